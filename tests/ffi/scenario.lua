-- The scenario of scenario.c, in LuaJIT: luajit scenario.lua RANK NAME. LIBDC_LIBRARY names the library, LIBDC_CDEF the
-- declarations, which bindings/python/gen_cdef.py makes of the header.
local ffi = require("ffi")
local cdef = io.open(os.getenv("LIBDC_CDEF")):read("*a"):gsub("#define[^\n]*\n", "")
ffi.cdef(cdef)
local dc = ffi.load(os.getenv("LIBDC_LIBRARY"))

local RANKS, WEIGHTS, SHARD, GRAPH, ID = 2, 5, 3, 1, 7
local rank, name = tonumber(arg[1]), arg[2]

local function check(status)
  if status ~= 0 then
    error(ffi.string(dc.dc_status_name(status)) .. ": " .. ffi.string(dc.dc_last_error()))
  end
end

local function show(title, values, count)
  local bits = ffi.cast("const uint32_t *", values)
  local words = {title}
  for i = 0, count - 1 do
    words[#words + 1] = string.format("%08x", bits[i])
  end
  print(table.concat(words, " "))
end

-- A flat tensor of memory that must stay, as must the length.
local function tensor(data, length)
  local made = ffi.new("dc_tensor")
  dc.dc_tensor_init(made, ffi.sizeof(made))
  if data then
    made.data, made.shape, made.ndim, made.dtype = data, length, 1, dc.DC_FLOAT32
  end
  return made
end

local function made(kind, create)
  local out = ffi.new(kind .. " *[1]")
  check(create(out))
  return out[0]
end

print(string.format("libdc %s %d", ffi.string(dc.dc_version_string()), dc.dc_api_version()))
local comm = made("dc_comm", function(out) return dc.dc_comm_create_processes(name, rank, RANKS, nil, out) end)
local device = made("dc_device", function(out) return dc.dc_device_open("cpu", nil, out) end)
local user = ffi.new("char[5]", "mine")
local log = ffi.cast("dc_log_fn", function(level, message, pointer)
  print("log " .. ffi.string(ffi.cast("char *", pointer)) .. " " .. level .. " " .. ffi.string(message))
end)
local options = ffi.new("dc_context_options")
dc.dc_context_options_init(options, ffi.sizeof(options))
options.log, options.log_user = log, user
local context = made("dc_context", function(out) return dc.dc_context_create(device, options, out) end)
check(dc.dc_init(context, comm, nil, 64))
jit.off() -- a call that calls back must not be compiled

local weights, gradient = ffi.new("float[?]", SHARD), ffi.new("float[?]", SHARD)
for i = 0, SHARD - 1 do
  weights[i] = (rank * SHARD + i) * 0.5 - 1
end
local whole, part, ids = ffi.new("int64_t[1]", WEIGHTS), ffi.new("int64_t[1]", SHARD), ffi.new("int64_t[1]", ID)
check(dc.dc_register_z3_param(context, ID, whole, 1, tensor(weights, part), tensor(gradient, part), 0, 0))
check(dc.dc_register_graph_z3(context, GRAPH, ids, 1))

local full = tensor()
local function gather()
  check(dc.dc_allgather_param(context, nil, GRAPH, ID, 0, full))
  check(dc.dc_wait_allgather(context, nil, GRAPH, ID))
  show("full", full.data, WEIGHTS)
end

check(dc.dc_start_forward(context))
gather()
local own = ffi.new("float[?]", WEIGHTS)
for i = 0, WEIGHTS - 1 do
  own[i] = ffi.cast("float *", full.data)[i] * (rank + 1)
end
check(dc.dc_release_param(context, nil, GRAPH, ID, 2))
check(dc.dc_end_forward(context)) -- logs that one of two users still has it
check(dc.dc_release_param(context, nil, GRAPH, ID, 2))

check(dc.dc_start_backward(context, 1))
check(dc.dc_reduce_grad(context, tensor(own, whole), GRAPH, ID))
check(dc.dc_end_backward(context, GRAPH, 0))
show("grad", gradient, SHARD)
for i = 0, SHARD - 1 do
  weights[i] = weights[i] - 0.5 * gradient[i]
end
check(dc.dc_context_params_updated(context, ids, 1))
gather()
check(dc.dc_release_param(context, nil, GRAPH, ID, 1))

local status = dc.dc_allgather_param(context, nil, GRAPH, 99, 0, full)
print("error " .. status .. " " .. ffi.string(dc.dc_status_name(status)) .. " " .. ffi.string(dc.dc_last_error()))
local stats = ffi.new("dc_memory_stats")
stats.struct_size = ffi.sizeof(stats)
check(dc.dc_context_get_memory_stats(context, stats))
print(string.format("stats %d %d %d", tonumber(stats.gathers), tonumber(stats.reductions),
  tonumber(stats.registered_params)))
dc.dc_context_destroy(context)
dc.dc_device_destroy(device)
dc.dc_comm_destroy(comm)
log:free()
print("done")
