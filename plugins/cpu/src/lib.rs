//! CPU_ATTN: attention on the CPU
