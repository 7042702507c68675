"""What a model is: sizes, families, storage formats, the folder it is read from. No torch."""
