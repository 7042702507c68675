"""The operators: each is described here, checks its arguments, and runs where its tensors are.

CUDA tensors go to kernels in Triton or CUDA (embedding, and products of many tokens or in float32,
to torch's own), CPU tensors to the PyTorch twins in kernels.ref. All take float32, bfloat16 and
float16, over codes bfloat16 alone, and accumulate in float32; copy_blocks takes words of any
meaning, and a cache of experts bytes. On a GPU every operator but packing enqueues on the current
stream, waits for nothing, and can be captured in a CUDA graph once it has run; its arguments must
stay alive until that work is done. On cards of compute capability 9 or more a kernel may start
before the one before it has ended; it waits for it before it touches anything but weights.
"""
