"""The forward and backward `simt` families: `forward/simt.cu` and `backward/simt.cu`."""
