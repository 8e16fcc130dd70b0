crate::stage::cases!();
