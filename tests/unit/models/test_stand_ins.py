from contextlib import ExitStack

from betahook.models import stand_ins


def double(function):
    return lambda x: 2 * function(x)


def test_a_function_is_replaced_once_until_the_last_context_ends():
    namespace = {"one": abs}
    with ExitStack() as first:
        with stand_ins.put(namespace, "one", double):
            first.enter_context(stand_ins.put(namespace, "one", double))
            assert namespace["one"](-3) == 6
        assert namespace["one"](-3) == 6
    assert namespace["one"] is abs


def test_a_stand_in_that_was_imported_is_replaced_in_its_new_place_too():
    namespace = {"one": abs}
    with stand_ins.put(namespace, "one", double):
        other = dict(namespace)
        with stand_ins.put(other, "one", double):
            assert (namespace["one"](-3), other["one"](-3)) == (6, 12)
        assert other["one"] is namespace["one"]


def test_what_was_put_there_meanwhile_stays():
    namespace = {"one": abs}
    with stand_ins.put(namespace, "one", double):
        namespace["one"] = max
    assert namespace["one"] is max
    with stand_ins.put(namespace, "one", double):
        del namespace["one"]
    assert not namespace
