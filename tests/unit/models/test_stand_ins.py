import functools
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


def test_a_function_of_a_class_is_replaced_and_comes_back_as_it_was():
    class Functions:
        one = staticmethod(abs)

    class Others(Functions):
        pass

    before = vars(Functions)["one"]
    with stand_ins.put(Functions, "one", lambda method: staticmethod(double(method.__func__))):
        assert Others.one(-3) == Others().one(-3) == 6
    assert vars(Functions)["one"] is before
    assert stand_ins.find(Others, "one") is None


def test_a_partial_function_of_a_stand_in_comes_back_as_it_was():
    namespace = {"one": pow}
    with stand_ins.put(namespace, "one", lambda function: lambda *args: 2 * function(*args)):
        namespace["two"] = partial = functools.partial(namespace["one"], 3)
        with stand_ins.put(namespace, "two", lambda it: functools.partial(lambda *args: 2 * it.func(*args), *it.args)):
            assert namespace["two"](2) == 36
            assert not vars(namespace["two"])  # which its copies would get
        assert namespace["two"] is partial
