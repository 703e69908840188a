"""What timm's train.py does with a network, by the same functions of timm's, on a CPU and without its options."""

import argparse

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.models import create_model, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, ParseKwargs

SIDE, BATCH = 32, 4


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir")
    parser.add_argument("--model")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--opt")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output")
    parser.add_argument("--experiment")
    parser.add_argument("--model-ema", action="store_true")
    return parser.parse_args()


def loader(args, split):
    data = create_dataset("", root=args.data_dir, split=split, is_training=split == "train", batch_size=BATCH)
    return create_loader(
        data,
        (3, SIDE, SIDE),
        BATCH,
        is_training=split == "train",
        use_prefetcher=False,
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        device=torch.device("cpu"),
    )


def main():
    args = options()
    torch.manual_seed(42)
    model = create_model(
        args.model, pretrained=False, in_chans=3, num_classes=args.num_classes, drop_rate=0.0, **args.model_kwargs
    )
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=0.01, momentum=0.9)
    start = resume_checkpoint(model, args.resume, optimizer) if args.resume else 0
    average = ModelEmaV3(model, decay=0.9)
    if args.resume:
        timm.models.load_checkpoint(average.module, args.resume, use_ema=True)
    train, held_out = loader(args, "train"), loader(args, "validation")
    scheduler, epochs = create_scheduler_v2(optimizer, "cosine", num_epochs=args.epochs)
    folder = timm.utils.get_outdir(args.output, args.experiment)
    saver = CheckpointSaver(model, optimizer, args, model_ema=average, checkpoint_dir=folder, recovery_dir=folder)
    for epoch in range(start, min(args.epochs, epochs)):
        model.train()
        for images, labels in train:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
        scheduler.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=validate(average.module, held_out))


@torch.no_grad()
def validate(model, data):
    model.eval()
    return sum(float((model(images).argmax(1) == labels).sum()) for images, labels in data)


if __name__ == "__main__":
    main()
