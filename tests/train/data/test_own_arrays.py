"""Arrays of the user: files, splits, refusals, and a run that is loaded and exported."""

import json
import pathlib

import numpy as np
import pytest

import train
from train import export
from train.__main__ import main
from train.data import own_arrays
from train.data.arrays import DataError


X = np.arange(60.0).reshape(20, 3)
Y = np.arange(20) % 4
IMAGES = np.arange(20 * 8 * 8).reshape(20, 8, 8).astype(np.uint8)


def save(folder, **arrays):
    """Writes an .npz file, and returns its path in a list."""
    np.savez(folder / "data.npz", **arrays)
    return [str(folder / "data.npz")]


def pair(folder, x, y):
    """Writes two .npy files, and returns their paths."""
    paths = [folder / "x.npy", folder / "y.npy"]
    for path, array in zip(paths, (x, y)):
        np.save(path, array)
    return list(map(str, paths))


def test_a_tenth_is_held_out_at_random(tmp_path):
    found = own_arrays.load(save(tmp_path, x=X, y=Y[:, None]))
    order = np.random.RandomState(0).permutation(20)
    np.testing.assert_array_equal(found.train.images, X[order[:18]])
    np.testing.assert_array_equal(found.test.labels, Y[order[18:]])
    assert found.num_classes == 4 and found.image_shape == (3,)
    assert found.train.images.dtype == np.float32
    same = own_arrays.load(pair(tmp_path, X, Y))
    assert same.digest() == found.digest()


def test_arrays_for_testing_and_gray_images(tmp_path):
    parts = dict(x_train=IMAGES, y_train=Y, x_test=IMAGES[:5], y_test=Y[:5] + 3)
    found = own_arrays.load(save(tmp_path, **parts))
    assert found.train.images.shape == (20, 8, 8, 1) and found.train.images.dtype == "u1"
    np.testing.assert_array_equal(found.test.images[..., 0], IMAGES[:5])
    assert found.num_classes == 7


WRONG = {
    "no array": (dict(), "it holds nothing"),
    "other names": (dict(a=X, b=Y), "must be an .npz file with x_train, y_train, x_te"),
    "lengths": (dict(x=X, y=Y[:5]), "got the shapes [20, 3] and [5]"),
    "no numbers": (dict(x=X[:, :0], y=Y), "got the shapes [20, 0] and [20]"),
    "columns of labels": (dict(x=X, y=np.eye(20)), "got the shapes [20, 3] and [20, 20]"),
    "words": (dict(x=X, y=np.array(["a"] * 20)), "labels must be whole numbers, got <U1"),
    "halves": (dict(x=X, y=Y / 2), "labels must be whole numbers, got float64"),
    "a label of nan": (dict(x=X, y=Y * np.nan), "labels must be whole numbers, got float"),
    "negative": (dict(x=X, y=Y - 1), "from 0 to the number of classes - 1, got -1 to 2"),
    "one class": (dict(x=X, y=0 * Y), "at least two classes to tell apart, got one"),
    "nan": (dict(x=X * np.nan, y=Y), "inputs must be finite in float32"),
    "too large": (dict(x=X * 1e300, y=Y), "inputs must be finite in float32"),
    "complex": (dict(x=X * 1j, y=Y), "inputs must be numbers, got complex128"),
    "shapes": (
        dict(x_train=X, y_train=Y, x_test=X[:, :2], y_test=Y),
        "x_train and x_test must have inputs of one shape, got [20, 3] and [20, 2]",
    ),
    "types": (
        dict(x_train=X, y_train=Y, x_test=X.astype(np.uint8), y_test=Y),
        "x_train and x_test must have one type, got float64 and uint8",
    ),
    "objects": (dict(x=np.array([{}] * 20), y=Y), "is no file of numeric arrays: Object"),
}


@pytest.mark.parametrize("arrays, message", WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_wrong_arrays_are_refused(arrays, message, tmp_path):
    files = save(tmp_path, **arrays)
    with pytest.raises(DataError) as refused:
        own_arrays.load(files)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "`data.arrays` must name an .npz file with x_train, y_train,"),
        ("--data.arrays none.npz", "none.npz cannot be read: No such file or directory"),
        ("--data.arrays DIR/cut.npz", "cut.npz is no file of numeric arrays: "),
        ("--data.arrays DIR/x.npy DIR/npz.npy", "npz.npy is no .npy file, but holds"),
        ("--data.arrays DIR/npy.npz", "npy.npz is no .npz file, but a single array"),
        ("--data.arrays DIR/x.npy", "or two .npy files: inputs, then labels, got "),
        ("--data.arrays DIR/x.npy DIR/y.npy --model cnn7", "'cnn7' takes images [H, W, C]"),
        ("--data.arrays DIR/x.npy DIR/y.npy", "`batch_size` must be at most 18, the num"),
        ("--data.name digits --data.arrays x.npz", "left out with data.name=digits"),
    ],
)
def test_wrong_usage(words, message, tmp_path, refusal):
    pair(tmp_path, X, Y)
    whole = pathlib.Path(*save(tmp_path, x=X, y=Y))
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-30])
    (tmp_path / "npz.npy").write_bytes(whole.read_bytes())
    (tmp_path / "npy.npz").write_bytes((tmp_path / "x.npy").read_bytes())
    line = f"arrays {words}".replace("DIR", str(tmp_path))
    assert message in refusal(main, line.split())


def test_a_run_learns_from_arrays_and_its_model_is_loaded(tmp_path):
    x = np.random.RandomState(1).randn(200, 3)
    files = save(tmp_path, x=x, y=x[:, 0] > 0)
    run = tmp_path / "run"
    line = "--steps 60 --test-every 30 --workers.locals 2 --optimizer.learning-rate 0.01"
    command = ["arrays", "--data.arrays", *files, *line.split(), "--run-dir", str(run)]
    assert main(command) == 0
    loaded = train.load(run)
    assert loaded.tested["error"] <= 15 and loaded.shape == (3,)
    guessed = np.asarray(loaded.logits(x.astype(np.float32))).argmax(1)
    assert (guessed == (x[:, 0] > 0)).mean() > 0.9
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    described = json.loads((tmp_path / "out" / "model.json").read_text())
    assert described["input"] == {"shape": [3], "dtype": "float32"}
