#!/usr/bin/env python3
"""Makes digits.bin from scikit-learn's wheel, which pip downloads: data.py [FILE].

Writes to FILE if given. The images are the test part of "Optical Recognition of Handwritten Digits"
by E. Alpaydin and C. Kaynak (1998), from the UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licensed under CC BY 4.0. scikit-learn (BSD-3-Clause) ships them as
a table of 1797 rows: 64 pixels of 0 to 16, row by row, and the digit. Here a row has 41 bytes: the
digit, then each pixel in 5 bits, most significant bit first.
"""
import csv, glob, gzip, hashlib, io, pathlib, subprocess, sys, tempfile, zipfile

WHEEL = "scikit-learn==1.9.1"
ROWS = 1797

with tempfile.TemporaryDirectory() as folder:
    fetch = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, WHEEL]
    subprocess.run([sys.executable, "-m", *fetch], check=True)
    (wheel,) = glob.glob(f"{folder}/*.whl")
    table = gzip.decompress(zipfile.ZipFile(wheel).read("sklearn/datasets/data/digits.csv.gz")).decode()

packed = bytearray()
for row in csv.reader(io.StringIO(table)):
    *pixels, digit = (int(float(value)) for value in row)
    assert len(pixels) == 64 and digit < 10 and all(0 <= pixel <= 16 for pixel in pixels), row
    bits = 0
    for pixel in pixels:
        bits = bits << 5 | pixel
    packed += bytes([digit]) + bits.to_bytes(40, "big")
assert len(packed) == 41 * ROWS, len(packed)

out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("digits.bin")
out.write_bytes(packed)
print(f"{out}: {len(packed)} bytes, SHA-256 {hashlib.sha256(packed).hexdigest()}")
