"""Language models by name: loading, adapters, the embedded nets, planting."""
