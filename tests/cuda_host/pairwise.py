"""A few cases in place of all: every two values of two parameters come together in one of them."""

import itertools


def pairwise(parameters):
    """Return cases, as dicts, that hold each pair of values of two parameters at least once.

    Greedy: a case starts with a pair that is still missing, and takes for every other parameter the value that brings
    most missing pairs.
    """
    names = list(parameters)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a, b in itertools.product(range(len(parameters[one])), range(len(parameters[other])))
    }
    cases = []
    while missing:
        case = dict(min(missing))
        for name in names:
            if name not in case:
                options = range(len(parameters[name]))
                case[name] = max(options, key=lambda value: _gain(names, case | {name: value}, name, missing))
        missing -= set(_pairs(names, case))
        cases.append({name: parameters[name][case[name]] for name in names})
    return cases


def _pairs(names, case):
    present = [(name, case[name]) for name in names if name in case]
    return itertools.combinations(present, 2)


def _gain(names, case, name, missing):
    return sum(pair in missing for pair in _pairs(names, case) if name in dict(pair))
