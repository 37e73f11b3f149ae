"""CUDA C++ kernels on the CPU: their real source, translated and compiled by the system's C++ compiler.

`translate` turns inline PTX into calls, `machine.*` is the GPU (threads as fibers in random order, shared memory,
barriers, copies that take their time), `ptx.h` and `cuda.h` are its instructions, `build` compiles one kernel, and
`launcher` launches it as `sits_plugins.launch.BundleLauncher` would.

It finds: wrong results, deadlocks, too many arrivals, reads of shared memory before a copy into it has arrived or after
the next one has begun, products whose registers are overwritten while they are under way, misaligned addresses. It does
not find missing memory fences, since every store is seen at once, nor touching memory before griddepcontrol.wait.
"""
