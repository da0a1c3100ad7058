-- A trainer has stored what a task's rollouts came to: their payloads and captured calls go, the summaries stay.
-- All or none: a rollout that has not ended, or that there is not, refuses the whole call.
-- KEYS task, events ; ARGV task_id, events_max, stem of rollout keys, of payloads, of completions, indices...
local task, events, task_id, stem = KEYS[1], KEYS[2], ARGV[1], ARGV[3]
local num = tonumber(redis.call('HGET', task, 'num') or 0)
if num == 0 then return {'unknown'} end
local indices = {}
for i = 6, #ARGV do indices[#indices + 1] = tonumber(ARGV[i]) end
if #indices == 0 then for i = 0, num - 1 do indices[#indices + 1] = i end end
local new = {}
for _, i in ipairs(indices) do
  local r = redis.call('HMGET', stem .. i, 'state', 'attempt', 'token', 'acknowledged_ms')
  if i >= num or not r[1] then return {'unknown', i} end
  if not ENDS[r[1]] then return {'not_ended', i, r[1]} end
  if not r[4] then new[#new + 1] = {i, tonumber(r[2]), tonumber(r[3])} end
end
local now = now_ms()
-- What frees memory comes first: after it, a full Redis lets a script finish.
for _, r in ipairs(new) do
  -- An attempt that did not count gave its number back, so the highest one may be one more than the last one.
  for token = 1, r[3] do
    for attempt = 1, math.min(token, r[2] + 1) do
      local name = r[1] .. ':' .. attempt .. '-' .. token
      redis.call('UNLINK', ARGV[5] .. name)
      local chunk = 0
      while redis.call('UNLINK', ARGV[4] .. name .. ':' .. chunk) == 1 do chunk = chunk + 1 end
    end
  end
end
for _, r in ipairs(new) do redis.call('HSET', stem .. r[1], 'acknowledged_ms', now) end
if #new > 0 then
  if redis.call('HINCRBY', task, 'acknowledged', #new) >= num then
    redis.call('ZREM', beside(events, 'run-tasks:' .. redis.call('HGET', task, 'run_id')), task_id)
  end
  emit(events, ARGV[2], 'task.acknowledged', {task_id = task_id, sessions = #new})
end
return {'ok', #new}
