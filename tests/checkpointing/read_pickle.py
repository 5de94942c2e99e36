"""read_pickle.py FILE: shows a file of torch.save's layout with Python's own zipfile and pickle, without torch."""
import pickle
import struct
import sys
import zipfile


class Tensor:
    def __init__(self, storage, offset, size, stride, *_):
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def __repr__(self):
        kind, key, count, data = self.storage
        first = f" {struct.unpack('<f', data[:4])[0]}" if kind == "FloatStorage" and count else ""
        return f"{kind} {key} {self.size} {self.stride}{first}"


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        known = {"torch._utils._rebuild_tensor_v2": Tensor, "collections.OrderedDict": dict}
        return known.get(f"{module}.{name}") or name

    def persistent_load(self, pid):
        kind, storage, key, location, count = pid
        assert kind == "storage" and location == "cpu"
        return storage, key, count, archive.read(f"{folder}data/{key}")


archive = zipfile.ZipFile(sys.argv[1])
assert archive.testzip() is None
names = archive.namelist()
folder = names[0][: -len("data.pkl")]
print(*names)
with open(sys.argv[1], "rb") as file:
    for info in archive.infolist():
        file.seek(info.header_offset)
        header = struct.unpack("<IHHHHHIIIHH", file.read(30))
        assert (info.header_offset + 30 + header[9] + header[10]) % 64 == 0, info.filename
print("aligned to 64")
print(Unpickler(archive.open(names[0])).load())
