"""`torch.save` of a predictor says that there is a better way; pickle, which other processes need, does not."""

import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import favour
import favour.errors


def test_torch_save_points_to_save():
    predict = favour.compile(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), torch.zeros(2, 3))
    with pytest.warns(favour.errors.PickledPredictor, match=r"predict\.save"):
        torch.save(predict, io.BytesIO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(predict))
    x = torch.randn(4, 3)
    torch.testing.assert_close(again(x).mean, predict(x).mean)
