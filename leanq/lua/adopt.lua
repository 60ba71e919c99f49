#!lua flags=no-writes
-- adopt: compares what a worker holds with its processing list, after an answer got lost on the
-- wire. What it does not know is handed to it again, with the token it already has.
-- ARGV: worker, most attempts, the rids that it holds
-- Returns {per unknown request {rid, token, attempts, queued (ms), body, alone, lane},
--   rids it lost}.
local work, most = P .. ':work:' .. ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local held, jobs, lost = {}, {}, {}
for i = 3, #ARGV do
  held[ARGV[i]] = true
  if not call('ZSCORE', work, ARGV[i]) then lost[#lost + 1] = ARGV[i] end
end
for _, rid in ipairs(call('ZRANGE', work, 0, -1)) do
  if not held[rid] then
    local r = call('HMGET', P .. ':req:' .. rid, 'tok', 'n', 'at', 'l')
    local n = tonumber(r[2])
    jobs[#jobs + 1] = {rid, r[1], n, now - tonumber(r[3]), call('GET', P .. ':body:' .. rid),
      is_suspect(n - 1, most) and 1 or 0, r[4]}
  end
end
return {jobs, lost}
