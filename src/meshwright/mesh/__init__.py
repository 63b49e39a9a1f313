"""Descriptions of named mesh axes, and the device meshes and process groups built from them."""
