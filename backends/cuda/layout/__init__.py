"""Where everything stands in a kernel's memory, and the header that tells the kernel so. No torch."""
