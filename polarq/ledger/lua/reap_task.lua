-- Puts one running task right: its rollouts are in the index that their state says, its counters are what its rollouts
-- are, and when all of them ended it ends too. Answers 'finished', 'mended' or 'right'.
-- KEYS task, leases, waiting, events, tasks ; ARGV task_id, events_max, stem, keep_s
local task, leases, waiting, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local task_id, stem = ARGV[1], ARGV[3]
local t = redis.call('HMGET', task, 'state', 'num', 'queued', 'completed', 'failed', 'timed_out', 'cancelled')
if not t[1] then
  redis.call('ZREM', tasks, task_id)
  return 'right'
end
if t[1] ~= 'running' and t[1] ~= 'cancelling' then return 'right' end
local now, word = now_ms(), 'right'
local counts = {queued = 0, completed = 0, failed = 0, timed_out = 0, cancelled = 0}
for i = 0, tonumber(t[2]) - 1 do
  local id = task_id .. '.' .. i
  local r = redis.call('HMGET', stem .. i, 'state', 'lease_ms')
  local state = r[1]
  -- A rollout whose record is gone: nothing can be said of it.
  if not state then return word end
  if counts[state] then counts[state] = counts[state] + 1 end
  if state == 'queued' then
    if not redis.call('ZSCORE', waiting, id) then
      wait_in_line(waiting, task, id, now)
      word = 'mended'
    end
  elseif not ENDS[state] and not redis.call('ZSCORE', leases, id) then
    be_held(leases, task, id, r[2] or now)
    word = 'mended'
  end
end
local n = 3
for _, name in ipairs({'queued', 'completed', 'failed', 'timed_out', 'cancelled'}) do
  if tonumber(t[n] or 0) ~= counts[name] then
    redis.call('HSET', task, name, counts[name])
    word = 'mended'
  end
  n = n + 1
end
if ended(task) < tonumber(t[2]) then return word end
touch(task, tasks, task_id, now)
finish(task, events, ARGV[2], stem, task_id, ARGV[4], now)
return 'finished'
