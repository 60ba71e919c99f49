-- arguments: max_attempts
-- Returns whether a request runs alone from now on: for the latter half of its attempts. So a killer takes
-- others down at most half of the times, and requests beside it are not condemned. A request hit by random
-- kills has the other half still to come.
local function is_isolated(attempts) return attempts > 0 and attempts >= max_attempts / 2 end
