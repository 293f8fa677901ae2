(* The scenario of scenario.c, in OCaml by ctypes: scenario RANK NAME. LIBDC_LIBRARY names the library. *)
open Ctypes
open Foreign

let ranks, weights_count, shard_count, graph, id, none, float32 = 2, 5, 3, 1L, 7L, 0, 1
let from = Dl.dlopen ~filename:(Sys.getenv "LIBDC_LIBRARY") ~flags:[ Dl.RTLD_NOW ]
let dc name kind = foreign ~from ("dc_" ^ name) kind
let handle = ptr void

type tensor
let tensor : tensor structure typ = structure "dc_tensor"
let struct_size = field tensor "struct_size" size_t
let data = field tensor "data" (ptr void)
let shape = field tensor "shape" (ptr int64_t)
let _strides = field tensor "strides" (ptr int64_t)
let ndim = field tensor "ndim" int32_t
let dtype = field tensor "dtype" int32_t
let _buffer = field tensor "buffer" (ptr void)
let () = seal tensor

let log_fn = int32_t @-> string @-> string @-> returning void

type options
let options : options structure typ = structure "dc_context_options"
let options_size = field options "struct_size" size_t
let options_log = field options "log" (funptr log_fn)
let options_user = field options "log_user" (ptr char)
let () = seal options

let version_string = dc "version_string" (void @-> returning string)
let api_version = dc "api_version" (void @-> returning uint32_t)
let last_error = dc "last_error" (void @-> returning string)
let status_name = dc "status_name" (int @-> returning string)
let comm_create = dc "comm_create_processes" (string @-> int @-> int @-> handle @-> ptr handle @-> returning int)
let comm_destroy = dc "comm_destroy" (handle @-> returning void)
let device_open = dc "device_open" (string @-> handle @-> ptr handle @-> returning int)
let device_destroy = dc "device_destroy" (handle @-> returning void)
let context_create = dc "context_create" (handle @-> ptr options @-> ptr handle @-> returning int)
let context_destroy = dc "context_destroy" (handle @-> returning void)
let init = dc "init" (handle @-> handle @-> handle @-> int64_t @-> returning int)
let register_param =
  dc "register_z3_param"
    (handle @-> int64_t @-> ptr int64_t @-> int @-> ptr tensor @-> ptr tensor @-> int @-> int @-> returning int)
let register_graph = dc "register_graph_z3" (handle @-> int64_t @-> ptr int64_t @-> int64_t @-> returning int)
let start_forward = dc "start_forward" (handle @-> returning int)
let end_forward = dc "end_forward" (handle @-> returning int)
let start_backward = dc "start_backward" (handle @-> int @-> returning int)
let end_backward = dc "end_backward" (handle @-> int64_t @-> int @-> returning int)
let allgather =
  dc "allgather_param" (handle @-> handle @-> int64_t @-> int64_t @-> int @-> ptr tensor @-> returning int)
let wait_allgather = dc "wait_allgather" (handle @-> handle @-> int64_t @-> int64_t @-> returning int)
let release = dc "release_param" (handle @-> handle @-> int64_t @-> int64_t @-> int64_t @-> returning int)
let reduce_grad = dc "reduce_grad" (handle @-> ptr tensor @-> int64_t @-> int64_t @-> returning int)
let params_updated = dc "context_params_updated" (handle @-> ptr int64_t @-> int64_t @-> returning int)
let memory_stats = dc "context_get_memory_stats" (handle @-> ptr int64_t @-> returning int)

let check status = if status <> 0 then failwith (status_name status ^ ": " ^ last_error ())

let create maker =
  let out = allocate handle null in
  check (maker out);
  !@out

(* A flat tensor of memory that must stay, as must the length. *)
let tensor_of memory length =
  let made = make tensor in
  setf made struct_size (Unsigned.Size_t.of_int (sizeof tensor));
  setf made data (to_voidp memory);
  setf made shape length;
  setf made ndim 1l;
  setf made dtype (Int32.of_int float32);
  made

let show title values =
  let bits value = Printf.sprintf " %08lx" (Int32.bits_of_float value) in
  print_endline (title ^ String.concat "" (List.map bits values))

let step context rank =
  let value i = (float_of_int ((rank * shard_count) + i) *. 0.5) -. 1.0 in
  let weights = CArray.of_list float (List.init shard_count value) in
  let gradient = CArray.make float shard_count in
  let whole, part, ids = allocate int64_t 5L, allocate int64_t 3L, allocate int64_t id in
  let full = tensor_of null (from_voidp int64_t null) in
  let gather () =
    check (allgather context null graph id none (addr full));
    check (wait_allgather context null graph id);
    let values = CArray.to_list (CArray.from_ptr (from_voidp float (getf full data)) weights_count) in
    show "full" values;
    values
  in
  let shard, grad = tensor_of (CArray.start weights) part, tensor_of (CArray.start gradient) part in
  check (register_param context id whole 1 (addr shard) (addr grad) 0 none);
  check (register_graph context graph ids 1L);

  check (start_forward context);
  let own = CArray.of_list float (List.map (fun v -> v *. float_of_int (rank + 1)) (gather ())) in
  check (release context null graph id 2L);
  check (end_forward context); (* logs that one of two users still has it *)
  check (release context null graph id 2L);

  check (start_backward context 1);
  let own_grad = tensor_of (CArray.start own) whole in
  check (reduce_grad context (addr own_grad) graph id);
  check (end_backward context graph 0);
  show "grad" (CArray.to_list gradient);
  for i = 0 to shard_count - 1 do
    CArray.set weights i (CArray.get weights i -. (0.5 *. CArray.get gradient i))
  done;
  check (params_updated context ids 1L);
  ignore (gather ());
  check (release context null graph id 1L);

  let status = allgather context null graph 99L none (addr full) in
  Printf.printf "error %d %s %s\n" status (status_name status) (last_error ());
  let stats = CArray.make int64_t ~initial:0L 18 in
  CArray.set stats 0 144L;
  check (memory_stats context (CArray.start stats));
  Printf.printf "stats %Ld %Ld %Ld\n%!" (CArray.get stats 8) (CArray.get stats 11) (CArray.get stats 16);
  weights, gradient, own, whole, part, ids (* the library has their addresses *)

let () =
  let rank, name = int_of_string Sys.argv.(1), Sys.argv.(2) in
  Printf.printf "libdc %s %s\n%!" (version_string ()) (Unsigned.UInt32.to_string (api_version ()));
  let comm = create (comm_create name rank ranks null) in
  let device = create (device_open "cpu" null) in
  let user = CArray.of_string "mine" in
  let log level message user = Printf.printf "log %s %ld %s\n%!" user level message in
  let chosen = make options in
  setf chosen options_size (Unsigned.Size_t.of_int (sizeof options));
  setf chosen options_log log;
  setf chosen options_user (CArray.start user);
  let context = create (context_create device (addr chosen)) in
  check (init context comm null 64L);
  let held = step context rank in
  context_destroy context;
  device_destroy device;
  comm_destroy comm;
  ignore (Sys.opaque_identity (held, user, log, chosen));
  print_endline "done"
