"""The programs behind harness presets: which versions are supported, and how one gets into a sandbox."""
