"""compare.py DIR WEIGHTS LOGITS [--arch resnet18] [--size 224]: torchvision's logits of the pictures in DIR/val by the weights of a .pth file, beside
those that imagenet --evaluate --logits wrote. Ends with 1 where they differ by more than 1e-3 of the largest, or the order of the best five does.
"""
import argparse
import sys

import torch
from safetensors.torch import load_file
from torchvision import datasets, models, transforms


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("weights")
    parser.add_argument("logits")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    images = datasets.ImageFolder(f"{options.folder}/val", transforms.Compose([
        transforms.Resize(options.size * 256 // 224), transforms.CenterCrop(options.size), transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]))
    model = models.get_model(options.arch, num_classes=len(images.classes)).eval()
    model.load_state_dict(torch.load(options.weights))
    with torch.no_grad():
        theirs = torch.cat([model(image[None]) for image, _ in images])
    ours = load_file(options.logits)["logits"]
    difference = ((theirs - ours).abs().max() / theirs.abs().max()).item()
    same = (theirs.topk(5).indices == ours.topk(5).indices).all(1).sum().item()
    print(f"{len(images)} pictures: logits differ by {difference:.1e} of the largest; the best five are the same of {same}")
    sys.exit(difference > 1e-3 or same < len(images))


if __name__ == "__main__":
    main()
