"""The forward and backward `mma` families: `forward/mma.cu` and `backward/mma.cu`."""
