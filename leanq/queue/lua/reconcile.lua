#!lua flags=no-writes
-- reconcile: compares what a worker holds with its processing list, after an answer got lost on the
-- wire. What it does not know is handed to it again, with the token it already has.
-- ARGV: worker, most attempts, the request ids that it holds
-- Returns {per unknown request five values: request id, about and submitted (ms) as claim gives them, body,
--   token; request ids it lost, now (ms)}.
local work, most = P .. ':work:' .. ARGV[1], tonumber(ARGV[2])
local held, jobs, lost = {}, {}, {}
for i = 3, #ARGV do
  held[ARGV[i]] = true
  if not call('ZSCORE', work, ARGV[i]) then lost[#lost + 1] = ARGV[i] end
end
for _, request_id in ipairs(call('ZRANGE', work, 0, -1)) do
  local run = not held[request_id] and read_lease(call('HGET', WHERE, request_id))
  if run then
    local text = call('GET', REQ .. one_like(request_id, run))
    local r = read_record(text)
    if r then
      local alone = is_quarantined(r[ATTEMPTS], most) and ' 1 ' or ' 0 '
      for _, value in ipairs({request_id, r[ATTEMPTS] + 1 .. alone .. r[ENVIRONMENT], r[AT], string.sub(text, r[BODY]),
        run.token}) do
        jobs[#jobs + 1] = value
      end
    end
  end
end
return {jobs, lost, now_ms()}
