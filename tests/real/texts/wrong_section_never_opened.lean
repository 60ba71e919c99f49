theorem fine : 1 = 1 := rfl

end Nothing

-- rejected lean_error
