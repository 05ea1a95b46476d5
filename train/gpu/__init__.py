# SPDX-License-Identifier: Apache-2.0
"""The network on a GPU: dense batches of streams, documents masked, for torch.compile, Triton and CUDA graphs."""
