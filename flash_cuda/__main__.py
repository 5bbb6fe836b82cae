import sys

try:
    from flash_cuda.cli import main
except ImportError as error:  # one sentence on what is missing, from flash_cuda._extension or from Python
    sys.exit(f"python -m flash_cuda: {error}")

sys.exit(main())
