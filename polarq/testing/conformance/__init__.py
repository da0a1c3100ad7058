"""The conformance suite of harness presets: the real program, in a real sandbox, against the real proxy.

Only the model is scripted. A program's scenario file (`programs/<harness>.yaml`, see `scenario`) says what that model
says to it; the checks (`checks`) are the same for all. `polarq harness check NAME` and tests/harnesses run them.
"""
