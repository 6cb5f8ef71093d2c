"""What draft heads are trained on: instructions whose answers the model itself gives."""
