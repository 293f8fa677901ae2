{ Three steps of AdamW on four weights, in Free Pascal: prints the bits that step.c prints.

      fpc -Fl$(pkg-config --variable=libdir dc) step.pas && ./step

  SPDX-License-Identifier: Apache-2.0 }
program step;

{$mode objfpc}
{$linklib dc}

uses
  ctypes, SysUtils;

const
  Weights = 4;
  Steps = 3;
  Float32 = 1;

type
  TTensor = record
    struct_size: csize_t;
    data: Pointer;
    shape: pcint64;
    strides: pcint64;
    ndim: cint32;
    dtype: cint32;
    buffer: Pointer;
  end;

  TAdamWOptions = record
    struct_size: csize_t;
    beta1, beta2, eps, weight_decay: cdouble;
    amsgrad, maximize, check_finite, reserved0: cint32;
  end;

  TValues = array[0..Weights - 1] of Single;

function dc_status_name(status: cint32): PAnsiChar; cdecl; external;
function dc_last_error: PAnsiChar; cdecl; external;
function dc_device_open(name: PAnsiChar; options: Pointer; out device: Pointer): cint32; cdecl; external;
procedure dc_device_destroy(device: Pointer); cdecl; external;
function dc_linalg_create(device, options: Pointer; out linalg: Pointer): cint32; cdecl; external;
procedure dc_linalg_destroy(linalg: Pointer); cdecl; external;
procedure dc_adamw_options_init(out options: TAdamWOptions; struct_size: csize_t); cdecl; external;
function dc_adamw_create(linalg: Pointer; constref options: TAdamWOptions; out adamw: Pointer): cint32; cdecl; external;
procedure dc_optimizer_destroy(optimizer: Pointer); cdecl; external;
function dc_optimizer_set_lr(optimizer: Pointer; group: cint32; lr: cdouble): cint32; cdecl; external;
function dc_optimizer_add_param(optimizer: Pointer; group: cint32; shape: pcint64; ndim: cint32; offset, count: cint64;
  dtype: cint32; out index: cint64): cint32; cdecl; external;
function dc_optimizer_step(optimizer: Pointer; constref weights, grads: TTensor; tensor_size: csize_t; count: cint64;
  grad_scale: cdouble): cint32; cdecl; external;

procedure Check(status: cint32);
begin
  if status <> 0 then
  begin
    WriteLn(StdErr, dc_status_name(status), ': ', dc_last_error);
    Halt(1);
  end;
end;

function Tensor(var values: TValues; var shape: cint64): TTensor;
begin
  FillChar(Result, SizeOf(Result), 0);
  Result.struct_size := SizeOf(Result);
  Result.data := @values;
  Result.shape := @shape;
  Result.ndim := 1;
  Result.dtype := Float32;
end;

var
  device, linalg, adamw: Pointer;
  options: TAdamWOptions;
  w: TValues = (1, -2, 3, 0.5);
  g: TValues = (0.5, 0.25, -1, 0);
  shape: cint64 = Weights;
  index: cint64;
  i: Integer;
begin
  dc_adamw_options_init(options, SizeOf(options));
  options.weight_decay := 0.1;
  Check(dc_device_open('cpu', nil, device));
  Check(dc_linalg_create(device, nil, linalg));
  Check(dc_adamw_create(linalg, options, adamw));
  Check(dc_optimizer_set_lr(adamw, 0, 0.01));
  Check(dc_optimizer_add_param(adamw, 0, @shape, 1, 0, Weights, Float32, index));
  for i := 1 to Steps do
    Check(dc_optimizer_step(adamw, Tensor(w, shape), Tensor(g, shape), SizeOf(TTensor), 1, 1.0));
  for i := 0 to Weights - 1 do
    WriteLn(LowerCase(IntToHex(PCardinal(@w[i])^, 8)), ' ', w[i]:0:6);
  dc_optimizer_destroy(adamw);
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
end.
