"""One thread: tests run small tensors on a shared machine, where a second thread mostly waits."""

import torch

torch.set_num_threads(1)
