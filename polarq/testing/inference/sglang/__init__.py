"""The same engine in SGLang's clothes: its routes, its JSON and its errors, release by release.

Written from the released source (0.5.13 to 0.5.23), not from captures.
"""
