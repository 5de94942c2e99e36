"""Pictures a second of a loader alone: Cairn's (threads) and torchvision's (processes) by turns, on JPEGs of 500 x 375 cut from the photographs of
scikit-image; RandomResizedCrop(224), flips, normalised f32 batches of 32.

picture_loader.py --program build/bench/bin/picture_loader [--workers 2] [--rounds 5] [--packages build/readers]
"""
import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples/11_imagenet"))
import make_pictures
import torch
from PIL import Image
from torchvision import datasets, transforms

EPOCHS = 3


def write_pictures(folder):
    for path in make_pictures.sources():
        (folder / path.stem).mkdir(parents=True)
        with Image.open(path) as file:
            picture = file.convert("RGB")
        for number in range(40):
            step = number * (picture.width // 4) // 40
            picture.crop((step, 0, step + picture.width * 3 // 4, picture.height)).resize((500, 375)).save(folder / path.stem / f"{number}.jpg",
                                                                                                          quality=90)


def theirs(folder, workers):
    change = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                                 transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    loader = torch.utils.data.DataLoader(datasets.ImageFolder(folder, change), 32, shuffle=True, num_workers=workers, persistent_workers=True)
    fastest = 0
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        fastest = max(fastest, count / (time.perf_counter() - begin))
    return fastest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", default="build/readers", help="where scikit-image is, if not where Python looks")
    options = parser.parse_args()
    sys.path.append(options.packages)
    rates, ratios = ([], []), []
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(pathlib.Path(folder))
        for _ in range(options.rounds):
            ours = float(subprocess.run([options.program, folder, str(options.workers), str(EPOCHS)], check=True, text=True,
                                        stdout=subprocess.PIPE).stdout)
            for side, rate in zip(rates, (ours, theirs(folder, options.workers))):
                side.append(rate)
            ratios.append(rates[0][-1] / rates[1][-1])
    print(f"pictures a second: Cairn {statistics.median(rates[0]):.0f}, torchvision {statistics.median(rates[1]):.0f}, "
          f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of {options.rounds} rounds, {options.workers} workers")


if __name__ == "__main__":
    main()
