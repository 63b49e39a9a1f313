"""Hugging Face's format: conversion shared by the families whose models `transformers` has."""
