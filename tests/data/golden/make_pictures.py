"""Writes pictures/ with Pillow and torchvision: files, NAME.rgb with the bytes [H, W, 3] of each (of 16 bits, rounded), and what resizing makes of
colour.jpg.

Pillow 13 resizes rows first where they shrink by more than twice the columns; nothing here does.
python3 make_pictures.py    in an environment with pillow, numpy and torchvision
"""
import pathlib
import struct
import zlib

import numpy
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, Resize

FOLDER = pathlib.Path(__file__).parent / "pictures"


def write(name, picture, **options):
    picture.save(FOLDER / name, **options)
    with Image.open(FOLDER / name) as read:
        expected = numpy.asarray(read.convert("RGB"))
    (FOLDER / name).with_suffix(".rgb").write_bytes(expected.tobytes())


def write_deep(name, values):
    """A PNG of 16 bits [H, W, 3], which Pillow cannot write; the bytes expected are its values rounded to 8 bits."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    (FOLDER / name).write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)) +
                                chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b""))
    rounded = (values.astype(numpy.uint32) * 255 + 32767) // 65535
    (FOLDER / name).with_suffix(".rgb").write_bytes(rounded.astype(numpy.uint8).tobytes())


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
    write_deep("deep.png", (waves.astype(numpy.uint16) * 256 + (7 * x + 11 * y)[..., None] % 256).astype(numpy.uint16))
    with Image.open(FOLDER / "colour.jpg") as read:
        colour = read.convert("RGB")
    made = {"shrunk": colour.crop((7, 5, 28, 28)).resize((12, 12), Image.BILINEAR), "grown": colour.crop((30, 2, 35, 8)).resize((12, 12), Image.BILINEAR),
            "middle": Compose([Resize(17), CenterCrop(12)])(colour)}
    for name, picture in made.items():
        (FOLDER / f"{name}.planes").write_bytes(numpy.asarray(picture).transpose(2, 0, 1).tobytes())


if __name__ == "__main__":
    main()
