"""Files for the sandbox. They run with the library's Python and know nothing of polarq, and import nothing of it.

Each library's has `model(name, base_url, api_key, dialect)`, the library's own object for a model; where the library
has a default of the whole process, `default(...)` with the same arguments sets it. `base_url` has no version in it.
"""
