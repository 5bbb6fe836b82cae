#include "bwd_launch.cuh"

namespace flash::fa2 {

template cudaError_t launch_bwd<__nv_bfloat16>(const BwdParams& p, cudaStream_t stream, int smem_available);

}  // namespace flash::fa2
