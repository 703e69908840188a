"""Data sets: CIFAR-10, ImageNet, CamVid, Cityscapes, SQuAD."""
