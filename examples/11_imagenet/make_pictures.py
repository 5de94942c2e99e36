"""Cuts classes of small pictures out of the photographs that scikit-image and scikit-learn bring along: DIR/train/CLASS/N.jpg and DIR/val/CLASS/N.jpg,
for programs that read ImageNet's layout. Parts of one photograph are a class; train has its left three quarters, val the rest.

make_pictures.py DIR [--packages FOLDER] [--train 40] [--val 10]    needs pillow; the packages may be installed without what they depend on
"""
import argparse
import importlib.util
import pathlib
import random
import sys

SOURCES = {
    "skimage": ["data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/ihc.png", "data/motorcycle_left.png", "data/retina.jpg",
                "data/rocket.jpg", "data/hubble_deep_field.jpg"],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
}


def sources():
    for package, files in SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is None:
            sys.exit(f"make_pictures: expected the package {package} (pip install --no-deps scikit-image scikit-learn)")
        for file in files:
            yield pathlib.Path(spec.submodule_search_locations[0], file)


def cut(picture, box, random_):
    """A part of 80 to 200 pixels a side."""
    left, top, right, bottom = box
    width, height = (min(random_.randint(80, 200), most) for most in (right - left, bottom - top))
    x, y = random_.randint(left, right - width), random_.randint(top, bottom - height)
    return picture.crop((x, y, x + width, y + height))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--packages", help="where the packages are, if not where Python looks")
    parser.add_argument("--train", type=int, default=40, help="pictures of a class")
    parser.add_argument("--val", type=int, default=10)
    options = parser.parse_args()
    if options.packages:
        sys.path.insert(0, options.packages)
    from PIL import Image
    for path in sources():
        random_ = random.Random(path.stem)
        with Image.open(path) as file:
            picture = file.convert("RGB")
        border = picture.width * 3 // 4
        for part, count, box in (("train", options.train, (0, 0, border, picture.height)),
                                 ("val", options.val, (border, 0, picture.width, picture.height))):
            folder = options.folder / part / path.stem
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                cut(picture, box, random_).save(folder / f"{number:03}.jpg", quality=90)


if __name__ == "__main__":
    main()
