"""What drivers say of GPUs, as their vendors publish it; of an H200 and its slices as NVIDIA's tools show it."""

from dataclasses import replace

from kog_triton.schedule.topology import KB, MB, Seen

H200_SEEN = Seen("NVIDIA H200", "nvidia", "sm_90a", 132, 227 * KB, 150_109_880_320, 60 * MB, 3.201e9, 6144)


def nvidia(name, arch, sms, gb, clock=2.619e9, bus=5120, shared=227, l2=50):
    return Seen(name, "nvidia", arch, sms, shared * KB, gb * 10**9, l2 * MB, clock, bus)


SEEN = {
    "H200": H200_SEEN,
    "H100 SXM": nvidia("NVIDIA H100 80GB HBM3", "sm_90a", 132, 80),
    "H100 PCIe": nvidia("NVIDIA H100 PCIe", "sm_90a", 114, 80, 1.593e9),
    "H100 NVL": nvidia("NVIDIA H100 NVL", "sm_90a", 132, 94),
    "H800": nvidia("NVIDIA H800", "sm_90a", 132, 80),
    "H20": nvidia("NVIDIA H20", "sm_90a", 78, 96, l2=60),
    "GH200": nvidia("NVIDIA GH200 480GB", "sm_90a", 132, 96),
    "B200": nvidia("NVIDIA B200", "sm_100a", 148, 180, 3.996e9, 8192, l2=126),
    "RTX 5090": nvidia("NVIDIA GeForce RTX 5090", "sm_120a", 170, 32, 14.001e9, 512, 99, 96),
    "RTX PRO 6000": nvidia(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120a", 188, 96, 14.001e9, 512, 99, 128
    ),
    "RTX 5090 Laptop": nvidia("NVIDIA GeForce RTX 5090 Laptop GPU", "sm_120a", 82, 24, 14.001e9, 256, 99, 64),
    "RTX 4090": nvidia("NVIDIA GeForce RTX 4090", "sm_89", 128, 24, 10.501e9, 384, 99, 72),
    "H200 slice": replace(
        H200_SEEN, name="NVIDIA H200 MIG 3g.71gb", num_sms=60, memory_bytes=74_900_000_000, l2_bytes=30 * MB
    ),
    "A100 slice": nvidia("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "sm_80", 14, 10, shared=163, l2=5),
    "H200 share": replace(H200_SEEN, percent=25),
}
