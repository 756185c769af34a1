"""The contracts, one a module: an argument record, a float64 golden and the cases that tell a wrong kernel from a right one.

`polydraft.contracts` imports whatever modules lie here, so a new contract is a new file and nothing else. A module is named
after its contract and registers it, and nothing in it knows a backend.
"""
