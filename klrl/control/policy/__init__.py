"""Actor and critic: networks, action distributions, acting."""
