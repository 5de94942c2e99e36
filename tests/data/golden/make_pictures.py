"""Writes pictures/ with Pillow and torchvision: files, NAME.rgb with the bytes [H, W, 3] of each, and what resizing makes of colour.jpg.

Pillow 13 resizes rows first where they shrink by more than twice the columns; nothing here does.
python3 make_pictures.py    in an environment with pillow, numpy and torchvision
"""
import pathlib

import numpy
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, Resize

FOLDER = pathlib.Path(__file__).parent / "pictures"


def write(name, picture, **options):
    picture.save(FOLDER / name, **options)
    with Image.open(FOLDER / name) as read:
        expected = numpy.asarray(read.convert("RGB"))
    (FOLDER / name).with_suffix(".rgb").write_bytes(expected.tobytes())


def main():
    FOLDER.mkdir(exist_ok=True)
    y, x = numpy.mgrid[0:53, 0:37]
    waves = numpy.stack([127 + 120 * numpy.sin(x / 3 + y / 7), 4 * y + x, 255 - 5 * x], -1).clip(0, 255).astype(numpy.uint8)
    colour = Image.fromarray(waves)
    write("colour.jpg", colour, quality=85)
    write("grey.jpg", colour.convert("L"), quality=70)
    write("inks.jpg", colour.convert("CMYK"), quality=90)
    write("palette.png", colour.quantize(17))
    write("see_through.png", Image.fromarray(numpy.dstack([waves, (x * 6).astype(numpy.uint8)])))
    with Image.open(FOLDER / "colour.jpg") as read:
        colour = read.convert("RGB")
    made = {"shrunk": colour.crop((7, 5, 28, 28)).resize((12, 12), Image.BILINEAR), "grown": colour.crop((30, 2, 35, 8)).resize((12, 12), Image.BILINEAR),
            "middle": Compose([Resize(17), CenterCrop(12)])(colour)}
    for name, picture in made.items():
        (FOLDER / f"{name}.planes").write_bytes(numpy.asarray(picture).transpose(2, 0, 1).tobytes())


if __name__ == "__main__":
    main()
