"""Float8 training of linear layers: scaling, casts, products and the layer; knows no mesh."""
