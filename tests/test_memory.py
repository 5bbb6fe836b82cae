"""Memory grows linearly with the length of the sequence."""

import kit

MEASURE = """
import re, torch, flash_cuda

torch.set_num_threads(2)  # every thread has tiles of its own

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

def peak_of(function):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is resident now
    before = status("VmRSS")
    result = function()
    return status("VmHWM") - before

def tensors(seqlen, heads, grad=False):
    return [torch.randn(1, seqlen, heads, 64, requires_grad=grad) for _ in range(3)]

def step(q, k, v, **options):
    flash_cuda.attention(q, k, v, **options).sum().backward()

version = "{version}"
step(*tensors(64, 1, True), version=version)  # what loads once does not count
"""

FORWARD = MEASURE + """
q, k, v = tensors(16384, 8)
print(peak_of(lambda: flash_cuda.attention(q, k, v, causal=True, version=version)))
"""

BACKWARD = MEASURE + """
for seqlen in (2048, 4096, 8192):
    inputs = tensors(seqlen, 2, True)
    print(peak_of(lambda: step(*inputs, causal=True, version=version)))
"""


@kit.each_version
def test_forward_of_16384_tokens(version):
    """q, k and v are 32 MB each, the scores would be 8 GB; the call's own peak, output included, is under 64 MB."""
    assert int(kit.python(FORWARD.replace("{version}", version), timeout=300)) < 64 * 2**20


@kit.each_version
def test_forward_and_backward_hold_a_few_tensors(version):
    """out, three gradients and what the backward needs, each as large as q; 8192 tokens have 512 MB of scores."""
    peaks = [int(line) for line in kit.python(BACKWARD.replace("{version}", version), timeout=300).split()]
    for seqlen, peak in zip((2048, 4096, 8192), peaks, strict=True):
        assert peak < 8 * (seqlen * 2 * 64 * 4) + 8 * 2**20
