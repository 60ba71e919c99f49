-- arguments: max_attempts
-- Whether a request runs alone from now on, after so many attempts were charged to it: for the latter half
-- of those that it has. A killer so takes others down with it no more than half of the times, and requests
-- beside it are not condemned; one that random kills hit has the other half still to come.
local function is_isolated(attempts) return attempts > 0 and attempts >= max_attempts / 2 end
