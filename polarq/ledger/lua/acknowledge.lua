-- A trainer has stored what a task's rollouts came to: their payloads and captured calls go, the summaries stay.
-- All or none: a rollout that has not ended, or that there is not, refuses the whole call.
-- Payloads in a Redis of their own are named for the caller to delete, also those that were acknowledged before: then
-- the caller may have died between the two steps, and what it left would stay until it expires.
-- KEYS task, events
-- ARGV task_id, events_max, stem of rollout keys, of payloads ('' when they are elsewhere), of completions, indices...
local task, events, task_id, stem = KEYS[1], KEYS[2], ARGV[1], ARGV[3]
local num = tonumber(redis.call('HGET', task, 'num') or 0)
if num == 0 then return {'unknown'} end
local indices = {}
for i = 6, #ARGV do indices[#indices + 1] = tonumber(ARGV[i]) end
if #indices == 0 then for i = 0, num - 1 do indices[#indices + 1] = i end end
local new, answer = {}, {'ok', 0}
for _, i in ipairs(indices) do
  local r = redis.call('HMGET', stem .. i, 'state', 'tries', 'acknowledged_ms')
  if i >= num or not r[1] then return {'unknown', i} end
  if not ENDS[r[1]] then return {'not_ended', i, r[1]} end
  if not r[3] then new[#new + 1] = i end
  for try in string.gmatch(r[2] or '', '%S+') do answer[#answer + 1] = i .. ':' .. try end
end
local now = now_ms()
-- What frees memory comes first: after it, a full Redis lets a script finish.
for n = 3, #answer do
  redis.call('UNLINK', ARGV[5] .. answer[n])
  if ARGV[4] ~= '' then
    local chunk = 0
    while redis.call('UNLINK', ARGV[4] .. answer[n] .. ':' .. chunk) == 1 do chunk = chunk + 1 end
  end
end
for _, i in ipairs(new) do redis.call('HSET', stem .. i, 'acknowledged_ms', now) end
if #new > 0 then
  if redis.call('HINCRBY', task, 'acknowledged', #new) >= num then
    redis.call('ZREM', beside(events, 'run-tasks:' .. redis.call('HGET', task, 'run_id')), task_id)
  end
  emit(events, ARGV[2], 'task.acknowledged', {task_id = task_id, sessions = #new})
end
answer[2] = #new
return answer
