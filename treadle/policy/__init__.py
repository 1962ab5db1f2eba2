"""Networks that train: the policy, its reference and its critic, behind protocols that know no device."""
