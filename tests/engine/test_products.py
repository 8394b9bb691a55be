"""Projections of one input as one matrix product: numbers, memory, and parameters that are written to or replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.model.families import Rows
from engine.model.products import Product, refresh_products
from tests.engine.launches import launched

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(9))


def linears(*sizes: int, bias: bool = False, seed: int = 0) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(16, size, bias=bias).requires_grad_(False) for size in sizes]


def rows(*layers: nn.Linear) -> list[Rows]:
    return [Rows(layer, 0, layer.out_features) for layer in layers]


def check(product: Product, layers: list[nn.Linear], launches: int = 1) -> None:
    expected = [layer(X) for layer in layers]
    with launched() as names:
        out = product(X)
    assert len(names) == launches, names
    for own, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(own, wanted)


def storages(layers: list[nn.Linear]) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for layer in layers for parameter in layer.parameters()}


@pytest.mark.parametrize("bias", [False, True])
def test_owned_parameters_become_views_of_one_matrix(bias: bool) -> None:
    layers = linears(8, 4, 4, bias=bias)
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    check(Product(*rows(*layers), moved=set()), layers)
    assert len(storages(layers)) == 1 + bias
    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert all(map(torch.equal, before, after)) and all(type(each) is nn.Parameter for each in after)


def test_a_second_engine_computes_with_the_same_matrix() -> None:
    layers = linears(8, 4, 4, bias=True)
    products = [Product(*rows(*layers), moved=set())]
    at = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
    products.append(Product(*rows(*layers), moved=set()))
    assert at == [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.weight.neg_()
    for product in products:
        check(product, layers)


def test_parameters_of_others_stay_where_they_are() -> None:
    layers = linears(8, 4, 4, bias=True)
    before = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
    check(Product(*rows(*layers)), layers, 3)
    assert before == [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]


@pytest.mark.parametrize("bias", [False, True])
def test_projections_that_share_a_layer_are_one_product_whoever_owns_it(bias: bool) -> None:
    (layer,) = linears(16, bias=bias)
    at = layer.weight.data_ptr()
    for moved in (None, set[int]()):
        parts = [Rows(layer, first, last) for first, last in ((0, 8), (8, 12), (12, 16))]
        with launched() as names:
            out = Product(*parts, moved=moved)(X)
        assert len(names) == 1 and torch.equal(torch.cat(out, dim=1), layer(X)) and layer.weight.data_ptr() == at


def test_biases_that_some_have_and_others_have_not() -> None:
    layers = [*linears(8, bias=True), *linears(4)]
    check(Product(*rows(*layers), moved=set()), layers, 2)


def test_a_layer_in_two_products_or_twice_in_one_is_moved_once() -> None:
    first, shared, other = linears(8, 4, 4)
    moved: set[int] = set()
    one, two = (Product(*rows(layer, shared), moved=moved) for layer in (first, other))
    check(one, [first, shared])
    check(two, [other, shared], 2)
    shared.weight.copy_(linears(4, seed=1)[0].weight)
    check(one, [first, shared])
    refresh_products([one, two])
    check(one, [first, shared])
    check(Product(*rows(other, other), moved=set()), [other, other], 2)


Write = Callable[[nn.Linear, torch.Tensor], None]


def write_in_place(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.weight.copy_(new)


def write_through_data(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.weight.data.copy_(new)


def load(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.load_state_dict({"weight": new})


def new_parameter(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.weight = nn.Parameter(new)


def new_data(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.weight.data = new


def load_by_assignment(layer: nn.Linear, new: torch.Tensor) -> None:
    layer.load_state_dict({"weight": new}, assign=True)


@pytest.mark.parametrize("write", [write_in_place, write_through_data, load])
def test_what_is_written_into_parameters_counts_at_once(write: Write) -> None:
    layers = linears(8, 4)
    product = Product(*rows(*layers), moved=set())
    write(layers[1], linears(4, seed=1)[0].weight)
    check(product, layers)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("write", [new_parameter, new_data, load_by_assignment])
def test_replaced_parameters_count_after_a_refresh_in_the_same_memory(write: Write, own: bool) -> None:
    layers = linears(8, 4)
    product = Product(*rows(*layers), moved=set() if own else None)
    at, new = layers[1].weight.data_ptr(), linears(4, seed=1)[0].weight.clone()
    write(layers[1], new.clone())
    refresh_products([product])
    check(product, layers, 1 if own else 2)
    assert torch.equal(layers[1].weight, new) and (layers[1].weight.data_ptr() == at) == own
    layers[1].weight.data.neg_()
    check(product, layers, 1 if own else 2)


def test_parameters_that_change_places() -> None:
    """Each lies where the other is to go."""
    layers, moved = linears(8, 4, 8, 4), set[int]()
    products = [Product(*rows(*pair), moved=moved) for pair in (layers[:2], layers[2:])]
    held = [layer.weight.clone() for layer in layers]
    layers[0].weight, layers[2].weight = layers[2].weight, layers[0].weight
    refresh_products(products)
    assert all(torch.equal(layers[a].weight, held[b]) for a, b in ((0, 2), (2, 0), (1, 1), (3, 3)))
    check(products[0], layers[:2])
    check(products[1], layers[2:])
