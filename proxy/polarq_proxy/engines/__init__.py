"""The inference engines, one file each: what each needs to give up its token ids."""
