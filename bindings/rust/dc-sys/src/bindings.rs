// Made by gen.sh from dc_api.h.

pub const DC_VERSION_MAJOR: u32 = 0;
pub const DC_VERSION_MINOR: u32 = 1;
pub const DC_VERSION_PATCH: u32 = 0;
pub const DC_API_VERSION: u32 = 1000;
pub type __int32_t = ::std::os::raw::c_int;
pub type __uint32_t = ::std::os::raw::c_uint;
pub type __int64_t = ::std::os::raw::c_long;
extern "C" {
    pub fn dc_api_version() -> u32;
}
extern "C" {
    pub fn dc_version_string() -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_has_feature(name: *const ::std::os::raw::c_char) -> i32;
}
extern "C" {
    pub fn dc_crc32c(crc: u32, data: *const ::std::os::raw::c_void, bytes: i64) -> u32;
}
pub type dc_status = i32;
pub const DC_OK: dc_status_code = 0;
pub const DC_E_INVALID: dc_status_code = -100;
pub const DC_E_NOT_FOUND: dc_status_code = -101;
pub const DC_E_EXISTS: dc_status_code = -102;
pub const DC_E_STATE: dc_status_code = -103;
pub const DC_E_STAGE: dc_status_code = -104;
pub const DC_E_DTYPE: dc_status_code = -105;
pub const DC_E_SHAPE: dc_status_code = -106;
pub const DC_E_BUSY: dc_status_code = -107;
pub const DC_E_NO_MEMORY: dc_status_code = -108;
pub const DC_E_NO_DEVICE: dc_status_code = -109;
pub const DC_E_UNSUPPORTED: dc_status_code = -110;
pub const DC_E_BUFFER_TOO_SMALL: dc_status_code = -111;
pub const DC_E_NOT_FINITE: dc_status_code = -112;
pub const DC_E_NOT_SYMMETRIC: dc_status_code = -113;
pub const DC_E_NOT_POSITIVE: dc_status_code = -114;
pub const DC_E_NOT_CONVERGED: dc_status_code = -115;
pub const DC_E_MISMATCH: dc_status_code = -200;
pub const DC_E_TIMEOUT: dc_status_code = -201;
pub const DC_E_PEER_DEAD: dc_status_code = -202;
pub const DC_E_ABORTED: dc_status_code = -203;
pub const DC_E_CALLBACK: dc_status_code = -204;
pub const DC_E_SYSTEM: dc_status_code = -205;
pub const DC_E_CORRUPT: dc_status_code = -206;
pub const DC_E_DEVICE: dc_status_code = -207;
pub const DC_E_INTERNAL: dc_status_code = -900;
pub type dc_status_code = i32;
extern "C" {
    pub fn dc_status_name(status: dc_status) -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_status_string(status: dc_status) -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_last_error() -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_last_error_copy(buf: *mut ::std::os::raw::c_char, cap: i64, needed: *mut i64) -> dc_status;
}
pub const DC_DTYPE_NONE: dc_dtype = 0;
pub const DC_FLOAT32: dc_dtype = 1;
pub const DC_FLOAT64: dc_dtype = 2;
pub const DC_FLOAT16: dc_dtype = 3;
pub const DC_BFLOAT16: dc_dtype = 4;
pub const DC_INT8: dc_dtype = 5;
pub const DC_INT32: dc_dtype = 6;
pub const DC_INT64: dc_dtype = 7;
pub const DC_UINT8: dc_dtype = 8;
pub const DC_INT16: dc_dtype = 9;
pub const DC_BOOL: dc_dtype = 10;
pub type dc_dtype = i32;
extern "C" {
    pub fn dc_dtype_size(dtype: i32) -> usize;
}
extern "C" {
    pub fn dc_dtype_name(dtype: i32) -> *const ::std::os::raw::c_char;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_buffer {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_tensor {
    pub struct_size: usize,
    pub data: *mut ::std::os::raw::c_void,
    pub shape: *const i64,
    pub strides: *const i64,
    pub ndim: i32,
    pub dtype: i32,
    pub buffer: *mut dc_buffer,
}
#[test]
fn bindgen_test_layout_dc_tensor() {
    assert_eq!(::std::mem::size_of::<dc_tensor>(), 48usize, concat!("Size of: ", stringify!(dc_tensor)));
    assert_eq!(::std::mem::align_of::<dc_tensor>(), 8usize, concat!("Alignment of ", stringify!(dc_tensor)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_data() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).data) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(data))
        );
    }
    test_field_data();
    fn test_field_shape() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).shape) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(shape))
        );
    }
    test_field_shape();
    fn test_field_strides() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).strides) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(strides))
        );
    }
    test_field_strides();
    fn test_field_ndim() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).ndim) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(ndim))
        );
    }
    test_field_ndim();
    fn test_field_dtype() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dtype) as usize - ptr as usize
            },
            36usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(dtype))
        );
    }
    test_field_dtype();
    fn test_field_buffer() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_tensor>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).buffer) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_tensor), "::", stringify!(buffer))
        );
    }
    test_field_buffer();
}
impl Default for dc_tensor {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_tensor_init(tensor: *mut dc_tensor, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_device {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_stream {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_event {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_allocator {
    pub struct_size: usize,
    pub alloc: ::std::option::Option<
        unsafe extern "C" fn(bytes: i64, align: i64, user: *mut ::std::os::raw::c_void) -> *mut ::std::os::raw::c_void,
    >,
    pub free: ::std::option::Option<
        unsafe extern "C" fn(
            ptr: *mut ::std::os::raw::c_void,
            bytes: i64,
            align: i64,
            user: *mut ::std::os::raw::c_void,
        ),
    >,
    pub destroy_user: ::std::option::Option<unsafe extern "C" fn(user: *mut ::std::os::raw::c_void)>,
    pub user: *mut ::std::os::raw::c_void,
}
#[test]
fn bindgen_test_layout_dc_allocator() {
    assert_eq!(::std::mem::size_of::<dc_allocator>(), 40usize, concat!("Size of: ", stringify!(dc_allocator)));
    assert_eq!(::std::mem::align_of::<dc_allocator>(), 8usize, concat!("Alignment of ", stringify!(dc_allocator)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_allocator>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_allocator), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_alloc() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_allocator>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).alloc) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_allocator), "::", stringify!(alloc))
        );
    }
    test_field_alloc();
    fn test_field_free() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_allocator>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).free) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_allocator), "::", stringify!(free))
        );
    }
    test_field_free();
    fn test_field_destroy_user() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_allocator>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).destroy_user) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_allocator), "::", stringify!(destroy_user))
        );
    }
    test_field_destroy_user();
    fn test_field_user() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_allocator>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).user) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_allocator), "::", stringify!(user))
        );
    }
    test_field_user();
}
impl Default for dc_allocator {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_allocator_init(allocator: *mut dc_allocator, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_device_options {
    pub struct_size: usize,
    pub allocator: *const dc_allocator,
    pub max_pinned_bytes: i64,
}
#[test]
fn bindgen_test_layout_dc_device_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_device_options>(),
        24usize,
        concat!("Size of: ", stringify!(dc_device_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_device_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_device_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_device_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_allocator() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).allocator) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_device_options), "::", stringify!(allocator))
        );
    }
    test_field_allocator();
    fn test_field_max_pinned_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).max_pinned_bytes) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_device_options), "::", stringify!(max_pinned_bytes))
        );
    }
    test_field_max_pinned_bytes();
}
impl Default for dc_device_options {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_device_options_init(options: *mut dc_device_options, struct_size: usize);
}
extern "C" {
    pub fn dc_device_open(
        name: *const ::std::os::raw::c_char,
        options: *const dc_device_options,
        device: *mut *mut dc_device,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_device_destroy(device: *mut dc_device);
}
extern "C" {
    pub fn dc_device_name(device: *const dc_device) -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_stream_create(device: *mut dc_device, stream: *mut *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_stream_wrap(
        device: *mut dc_device,
        native: *mut ::std::os::raw::c_void,
        stream: *mut *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_stream_destroy(stream: *mut dc_stream);
}
extern "C" {
    pub fn dc_stream_synchronize(stream: *mut dc_stream, timeout_ns: i64) -> dc_status;
}
pub type dc_stream_fn = ::std::option::Option<unsafe extern "C" fn(user: *mut ::std::os::raw::c_void)>;
extern "C" {
    pub fn dc_stream_call(stream: *mut dc_stream, fn_: dc_stream_fn, user: *mut ::std::os::raw::c_void) -> dc_status;
}
extern "C" {
    pub fn dc_event_create(device: *mut dc_device, event: *mut *mut dc_event) -> dc_status;
}
extern "C" {
    pub fn dc_event_destroy(event: *mut dc_event);
}
extern "C" {
    pub fn dc_event_record(event: *mut dc_event, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_event_wait(event: *mut dc_event, stream: *mut dc_stream, timeout_ns: i64) -> dc_status;
}
extern "C" {
    pub fn dc_event_query(event: *mut dc_event, passed: *mut i32) -> dc_status;
}
extern "C" {
    pub fn dc_buffer_retain(buffer: *mut dc_buffer) -> *mut dc_buffer;
}
extern "C" {
    pub fn dc_buffer_release(buffer: *mut dc_buffer);
}
extern "C" {
    pub fn dc_buffer_data(buffer: *const dc_buffer) -> *mut ::std::os::raw::c_void;
}
extern "C" {
    pub fn dc_buffer_bytes(buffer: *const dc_buffer) -> i64;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_comm {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_comm_options {
    pub struct_size: usize,
    pub timeout_ns: i64,
    pub heap_bytes: i64,
    pub secret: *const ::std::os::raw::c_char,
    pub network: *const ::std::os::raw::c_char,
    pub heartbeat_ns: i64,
    pub first_port: i32,
    pub last_port: i32,
    pub node: *const ::std::os::raw::c_char,
    pub tls: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_comm_options() {
    assert_eq!(::std::mem::size_of::<dc_comm_options>(), 72usize, concat!("Size of: ", stringify!(dc_comm_options)));
    assert_eq!(
        ::std::mem::align_of::<dc_comm_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_comm_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_timeout_ns() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).timeout_ns) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(timeout_ns))
        );
    }
    test_field_timeout_ns();
    fn test_field_heap_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).heap_bytes) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(heap_bytes))
        );
    }
    test_field_heap_bytes();
    fn test_field_secret() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).secret) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(secret))
        );
    }
    test_field_secret();
    fn test_field_network() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).network) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(network))
        );
    }
    test_field_network();
    fn test_field_heartbeat_ns() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).heartbeat_ns) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(heartbeat_ns))
        );
    }
    test_field_heartbeat_ns();
    fn test_field_first_port() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).first_port) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(first_port))
        );
    }
    test_field_first_port();
    fn test_field_last_port() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).last_port) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(last_port))
        );
    }
    test_field_last_port();
    fn test_field_node() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).node) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(node))
        );
    }
    test_field_node();
    fn test_field_tls() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tls) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(tls))
        );
    }
    test_field_tls();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            68usize,
            concat!("Offset of field: ", stringify!(dc_comm_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
impl Default for dc_comm_options {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_comm_options_init(options: *mut dc_comm_options, struct_size: usize);
}
extern "C" {
    pub fn dc_comm_create_threads(
        world_size: i32,
        options: *const dc_comm_options,
        comms: *mut *mut dc_comm,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_create_processes(
        name: *const ::std::os::raw::c_char,
        rank: i32,
        world_size: i32,
        options: *const dc_comm_options,
        comm: *mut *mut dc_comm,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_create_tcp(
        address: *const ::std::os::raw::c_char,
        name: *const ::std::os::raw::c_char,
        rank: i32,
        world_size: i32,
        options: *const dc_comm_options,
        comm: *mut *mut dc_comm,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_comm_callbacks {
    pub struct_size: usize,
    pub all_gather: ::std::option::Option<
        unsafe extern "C" fn(
            send: *const ::std::os::raw::c_void,
            recv: *mut ::std::os::raw::c_void,
            count: i64,
            dtype: i32,
            user: *mut ::std::os::raw::c_void,
        ) -> i32,
    >,
    pub reduce_scatter: ::std::option::Option<
        unsafe extern "C" fn(
            send: *const ::std::os::raw::c_void,
            recv: *mut ::std::os::raw::c_void,
            count: i64,
            dtype: i32,
            user: *mut ::std::os::raw::c_void,
        ) -> i32,
    >,
    pub broadcast: ::std::option::Option<
        unsafe extern "C" fn(
            data: *mut ::std::os::raw::c_void,
            bytes: i64,
            root: i32,
            user: *mut ::std::os::raw::c_void,
        ) -> i32,
    >,
    pub barrier: ::std::option::Option<unsafe extern "C" fn(user: *mut ::std::os::raw::c_void) -> i32>,
    pub dup: ::std::option::Option<
        unsafe extern "C" fn(user: *mut ::std::os::raw::c_void, new_user: *mut *mut ::std::os::raw::c_void) -> i32,
    >,
    pub abort: ::std::option::Option<unsafe extern "C" fn(user: *mut ::std::os::raw::c_void)>,
    pub destroy_user: ::std::option::Option<unsafe extern "C" fn(user: *mut ::std::os::raw::c_void)>,
    pub user: *mut ::std::os::raw::c_void,
    pub split: ::std::option::Option<
        unsafe extern "C" fn(
            ranks: *const i32,
            count: i32,
            user: *mut ::std::os::raw::c_void,
            new_user: *mut *mut ::std::os::raw::c_void,
        ) -> i32,
    >,
    pub all_to_all: ::std::option::Option<
        unsafe extern "C" fn(
            send: *const ::std::os::raw::c_void,
            send_counts: *const i64,
            recv: *mut ::std::os::raw::c_void,
            recv_counts: *const i64,
            dtype: i32,
            user: *mut ::std::os::raw::c_void,
        ) -> i32,
    >,
}
#[test]
fn bindgen_test_layout_dc_comm_callbacks() {
    assert_eq!(
        ::std::mem::size_of::<dc_comm_callbacks>(),
        88usize,
        concat!("Size of: ", stringify!(dc_comm_callbacks))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_comm_callbacks>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_comm_callbacks))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_all_gather() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).all_gather) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(all_gather))
        );
    }
    test_field_all_gather();
    fn test_field_reduce_scatter() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reduce_scatter) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(reduce_scatter))
        );
    }
    test_field_reduce_scatter();
    fn test_field_broadcast() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).broadcast) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(broadcast))
        );
    }
    test_field_broadcast();
    fn test_field_barrier() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).barrier) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(barrier))
        );
    }
    test_field_barrier();
    fn test_field_dup() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dup) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(dup))
        );
    }
    test_field_dup();
    fn test_field_abort() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).abort) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(abort))
        );
    }
    test_field_abort();
    fn test_field_destroy_user() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).destroy_user) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(destroy_user))
        );
    }
    test_field_destroy_user();
    fn test_field_user() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).user) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(user))
        );
    }
    test_field_user();
    fn test_field_split() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).split) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(split))
        );
    }
    test_field_split();
    fn test_field_all_to_all() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_comm_callbacks>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).all_to_all) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_comm_callbacks), "::", stringify!(all_to_all))
        );
    }
    test_field_all_to_all();
}
impl Default for dc_comm_callbacks {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_comm_callbacks_init(callbacks: *mut dc_comm_callbacks, struct_size: usize);
}
extern "C" {
    pub fn dc_comm_create_external(
        callbacks: *const dc_comm_callbacks,
        rank: i32,
        world_size: i32,
        options: *const dc_comm_options,
        comm: *mut *mut dc_comm,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_create_nccl(comm: *mut dc_comm, device: *mut dc_device, nccl: *mut *mut dc_comm) -> dc_status;
}
extern "C" {
    pub fn dc_nccl_get_version(version: *mut i32) -> dc_status;
}
extern "C" {
    pub fn dc_comm_create_mpi(options: *const dc_comm_options, comm: *mut *mut dc_comm) -> dc_status;
}
extern "C" {
    pub fn dc_mpi_get_version(version: *mut *const ::std::os::raw::c_char) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_launch {
    pub struct_size: usize,
    pub launcher: *const ::std::os::raw::c_char,
    pub address: *const ::std::os::raw::c_char,
    pub group: *const ::std::os::raw::c_char,
    pub rank: i32,
    pub world_size: i32,
    pub local_rank: i32,
    pub local_size: i32,
    pub node: i32,
    pub uses_mpi: i32,
}
#[test]
fn bindgen_test_layout_dc_launch() {
    assert_eq!(::std::mem::size_of::<dc_launch>(), 56usize, concat!("Size of: ", stringify!(dc_launch)));
    assert_eq!(::std::mem::align_of::<dc_launch>(), 8usize, concat!("Alignment of ", stringify!(dc_launch)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_launcher() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).launcher) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(launcher))
        );
    }
    test_field_launcher();
    fn test_field_address() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).address) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(address))
        );
    }
    test_field_address();
    fn test_field_group() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).group) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(group))
        );
    }
    test_field_group();
    fn test_field_rank() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).rank) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(rank))
        );
    }
    test_field_rank();
    fn test_field_world_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).world_size) as usize - ptr as usize
            },
            36usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(world_size))
        );
    }
    test_field_world_size();
    fn test_field_local_rank() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).local_rank) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(local_rank))
        );
    }
    test_field_local_rank();
    fn test_field_local_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).local_size) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(local_size))
        );
    }
    test_field_local_size();
    fn test_field_node() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).node) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(node))
        );
    }
    test_field_node();
    fn test_field_uses_mpi() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_launch>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).uses_mpi) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_launch), "::", stringify!(uses_mpi))
        );
    }
    test_field_uses_mpi();
}
impl Default for dc_launch {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_launch_init(launch: *mut dc_launch, struct_size: usize);
}
extern "C" {
    pub fn dc_launch_get(launch: *mut dc_launch) -> dc_status;
}
extern "C" {
    pub fn dc_comm_destroy(comm: *mut dc_comm);
}
extern "C" {
    pub fn dc_comm_rank(comm: *const dc_comm) -> i32;
}
extern "C" {
    pub fn dc_comm_size(comm: *const dc_comm) -> i32;
}
extern "C" {
    pub fn dc_comm_dup(comm: *mut dc_comm, copy: *mut *mut dc_comm) -> dc_status;
}
extern "C" {
    pub fn dc_comm_split(comm: *mut dc_comm, color: i32, key: i32, part: *mut *mut dc_comm) -> dc_status;
}
pub const DC_SUM: dc_reduce_op = 1;
pub const DC_MEAN: dc_reduce_op = 2;
pub type dc_reduce_op = i32;
extern "C" {
    pub fn dc_comm_all_gather(
        comm: *mut dc_comm,
        send: *const dc_tensor,
        recv: *mut dc_tensor,
        counts: *const i64,
        stream: *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_reduce_scatter(
        comm: *mut dc_comm,
        send: *const dc_tensor,
        recv: *mut dc_tensor,
        counts: *const i64,
        op: i32,
        stream: *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_all_reduce(comm: *mut dc_comm, data: *mut dc_tensor, op: i32, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_comm_broadcast(comm: *mut dc_comm, data: *mut dc_tensor, root: i32, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_comm_all_to_all(
        comm: *mut dc_comm,
        send: *const dc_tensor,
        send_counts: *const i64,
        recv: *mut dc_tensor,
        recv_counts: *const i64,
        stream: *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_gather(
        comm: *mut dc_comm,
        send: *const dc_tensor,
        recv: *mut dc_tensor,
        counts: *const i64,
        root: i32,
        stream: *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_scatter(
        comm: *mut dc_comm,
        send: *const dc_tensor,
        counts: *const i64,
        recv: *mut dc_tensor,
        root: i32,
        stream: *mut dc_stream,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_comm_barrier(comm: *mut dc_comm) -> dc_status;
}
extern "C" {
    pub fn dc_comm_group_begin(comm: *mut dc_comm) -> dc_status;
}
extern "C" {
    pub fn dc_comm_group_end(comm: *mut dc_comm, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_comm_abort(comm: *mut dc_comm, reason: *const ::std::os::raw::c_char);
}
extern "C" {
    pub fn dc_comm_set_checksums(comm: *mut dc_comm, enable: i32) -> dc_status;
}
extern "C" {
    pub fn dc_comm_check(comm: *mut dc_comm) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_context {
    _unused: [u8; 0],
}
pub const DC_LOG_ERROR: dc_log_level = 1;
pub const DC_LOG_WARNING: dc_log_level = 2;
pub const DC_LOG_INFO: dc_log_level = 3;
pub type dc_log_level = i32;
pub type dc_log_fn = ::std::option::Option<
    unsafe extern "C" fn(level: i32, message: *const ::std::os::raw::c_char, user: *mut ::std::os::raw::c_void),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_context_options {
    pub struct_size: usize,
    pub log: dc_log_fn,
    pub log_user: *mut ::std::os::raw::c_void,
}
#[test]
fn bindgen_test_layout_dc_context_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_context_options>(),
        24usize,
        concat!("Size of: ", stringify!(dc_context_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_context_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_context_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_context_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_context_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_log() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_context_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).log) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_context_options), "::", stringify!(log))
        );
    }
    test_field_log();
    fn test_field_log_user() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_context_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).log_user) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_context_options), "::", stringify!(log_user))
        );
    }
    test_field_log_user();
}
impl Default for dc_context_options {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_context_options_init(options: *mut dc_context_options, struct_size: usize);
}
extern "C" {
    pub fn dc_context_create(
        device: *mut dc_device,
        options: *const dc_context_options,
        context: *mut *mut dc_context,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_context_destroy(context: *mut dc_context);
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_config {
    pub struct_size: usize,
    pub symmetric_memory: i32,
    pub double_buffer: i32,
    pub free_activation_threshold: i64,
    pub sync_before_reduce: i32,
    pub sync_after_reduce: i32,
    pub sync_before_allgather: i32,
    pub sync_after_allgather: i32,
    pub check_finite: i32,
    pub replicas: i32,
}
#[test]
fn bindgen_test_layout_dc_config() {
    assert_eq!(::std::mem::size_of::<dc_config>(), 48usize, concat!("Size of: ", stringify!(dc_config)));
    assert_eq!(::std::mem::align_of::<dc_config>(), 8usize, concat!("Alignment of ", stringify!(dc_config)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_symmetric_memory() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).symmetric_memory) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(symmetric_memory))
        );
    }
    test_field_symmetric_memory();
    fn test_field_double_buffer() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).double_buffer) as usize - ptr as usize
            },
            12usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(double_buffer))
        );
    }
    test_field_double_buffer();
    fn test_field_free_activation_threshold() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).free_activation_threshold) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(free_activation_threshold))
        );
    }
    test_field_free_activation_threshold();
    fn test_field_sync_before_reduce() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).sync_before_reduce) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(sync_before_reduce))
        );
    }
    test_field_sync_before_reduce();
    fn test_field_sync_after_reduce() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).sync_after_reduce) as usize - ptr as usize
            },
            28usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(sync_after_reduce))
        );
    }
    test_field_sync_after_reduce();
    fn test_field_sync_before_allgather() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).sync_before_allgather) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(sync_before_allgather))
        );
    }
    test_field_sync_before_allgather();
    fn test_field_sync_after_allgather() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).sync_after_allgather) as usize - ptr as usize
            },
            36usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(sync_after_allgather))
        );
    }
    test_field_sync_after_allgather();
    fn test_field_check_finite() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).check_finite) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(check_finite))
        );
    }
    test_field_check_finite();
    fn test_field_replicas() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).replicas) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_config), "::", stringify!(replicas))
        );
    }
    test_field_replicas();
}
extern "C" {
    pub fn dc_config_init(config: *mut dc_config, struct_size: usize);
}
extern "C" {
    pub fn dc_init(
        context: *mut dc_context,
        comm: *mut dc_comm,
        config: *const dc_config,
        initial_reduce_bucket_size: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_cleanup(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_reset(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_context_step_abort(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_context_set_stream(context: *mut dc_context, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_context_check(context: *mut dc_context) -> dc_status;
}
pub const DC_MEMORY_DEVICE: dc_memory_kind = 1;
pub const DC_MEMORY_SHARED: dc_memory_kind = 2;
pub const DC_MEMORY_HOST: dc_memory_kind = 3;
pub type dc_memory_kind = i32;
extern "C" {
    pub fn dc_context_alloc(context: *mut dc_context, bytes: i64, kind: i32, buffer: *mut *mut dc_buffer) -> dc_status;
}
extern "C" {
    pub fn dc_register_param(
        context: *mut dc_context,
        id: i64,
        shape: *const i64,
        ndim: i32,
        tensor: *const dc_tensor,
        grad_buffer: *mut dc_tensor,
        offset: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_shard_range(numel: i64, rank: i32, world_size: i32, offset: *mut i64, count: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_register_z3_param(
        context: *mut dc_context,
        id: i64,
        shape: *const i64,
        ndim: i32,
        shard: *const dc_tensor,
        grad_buffer: *mut dc_tensor,
        persistent: i32,
        expected_grad_dtype: i32,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_context_set_param_name(
        context: *mut dc_context,
        id: i64,
        name: *const ::std::os::raw::c_char,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_context_update_param_grad_buffer(
        context: *mut dc_context,
        id: i64,
        grad_buffer: *mut dc_tensor,
        offset: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_unregister_param(context: *mut dc_context, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_set_persistent(context: *mut dc_context, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_clear_persistent(context: *mut dc_context, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_invalidate_gathered_param(context: *mut dc_context, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_clear_all_gathered_params(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_context_params_updated(context: *mut dc_context, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_context_accumulate_grads(context: *mut dc_context, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_register_graph_z0(context: *mut dc_context, graph_id: i64, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_register_graph_z1(context: *mut dc_context, graph_id: i64, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_register_graph_z2(context: *mut dc_context, graph_id: i64, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_register_graph_z3(context: *mut dc_context, graph_id: i64, ids: *const i64, count: i64) -> dc_status;
}
extern "C" {
    pub fn dc_unregister_graph(context: *mut dc_context, graph_id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_allgather_param(
        context: *mut dc_context,
        token: *const dc_tensor,
        graph_id: i64,
        id: i64,
        dtype: i32,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_prefetch_params_fused(
        context: *mut dc_context,
        graph_id: i64,
        ids: *const i64,
        dtypes: *const i32,
        count: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_wait_allgather(context: *mut dc_context, token: *const dc_tensor, graph_id: i64, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_release_param(
        context: *mut dc_context,
        token: *const dc_tensor,
        graph_id: i64,
        id: i64,
        n_users: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_take_param(
        context: *mut dc_context,
        graph_id: i64,
        id: i64,
        dtype: i32,
        buffer: *mut *mut dc_buffer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_reduce_grad(context: *mut dc_context, grad: *const dc_tensor, graph_id: i64, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_free_tensors(
        context: *mut dc_context,
        tensors: *const dc_tensor,
        tensor_size: usize,
        count: i64,
        freed: *mut i32,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_offload_tensor(
        context: *mut dc_context,
        tensor: *const dc_tensor,
        graph_id: i64,
        id: i64,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_wait_offload(
        context: *mut dc_context,
        token: *const dc_tensor,
        graph_id: i64,
        id: i64,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_reload_tensor(
        context: *mut dc_context,
        token: *const dc_tensor,
        graph_id: i64,
        id: i64,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_wait_reload(
        context: *mut dc_context,
        tensor: *const dc_tensor,
        graph_id: i64,
        id: i64,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_offload_parameter(context: *mut dc_context, token: *const dc_tensor, graph_id: i64, id: i64)
        -> dc_status;
}
extern "C" {
    pub fn dc_reload_parameter(context: *mut dc_context, token: *const dc_tensor, graph_id: i64, id: i64) -> dc_status;
}
extern "C" {
    pub fn dc_end_backward(context: *mut dc_context, graph_id: i64, release_buckets: i32) -> dc_status;
}
extern "C" {
    pub fn dc_start_forward(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_end_forward(context: *mut dc_context) -> dc_status;
}
extern "C" {
    pub fn dc_start_backward(context: *mut dc_context, update: i32) -> dc_status;
}
extern "C" {
    pub fn dc_context_grads_finite(context: *mut dc_context, finite: *mut i32, id: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_enable_profiling(context: *mut dc_context, enable: i32) -> dc_status;
}
extern "C" {
    pub fn dc_is_profiling(context: *const dc_context) -> i32;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_memory_stats {
    pub struct_size: usize,
    pub gathered_bytes: i64,
    pub gathered_peak_bytes: i64,
    pub bucket_bytes: i64,
    pub offload_bytes: i64,
    pub reload_bytes: i64,
    pub arena_bytes: i64,
    pub allocations: i64,
    pub gathers: i64,
    pub gather_hits: i64,
    pub gather_wire_bytes: i64,
    pub reductions: i64,
    pub reduce_wire_bytes: i64,
    pub flushes: i64,
    pub copied_d2h_bytes: i64,
    pub copied_h2d_bytes: i64,
    pub registered_params: i64,
    pub registered_graphs: i64,
}
#[test]
fn bindgen_test_layout_dc_memory_stats() {
    assert_eq!(::std::mem::size_of::<dc_memory_stats>(), 144usize, concat!("Size of: ", stringify!(dc_memory_stats)));
    assert_eq!(
        ::std::mem::align_of::<dc_memory_stats>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_memory_stats))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_gathered_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gathered_bytes) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(gathered_bytes))
        );
    }
    test_field_gathered_bytes();
    fn test_field_gathered_peak_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gathered_peak_bytes) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(gathered_peak_bytes))
        );
    }
    test_field_gathered_peak_bytes();
    fn test_field_bucket_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).bucket_bytes) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(bucket_bytes))
        );
    }
    test_field_bucket_bytes();
    fn test_field_offload_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).offload_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(offload_bytes))
        );
    }
    test_field_offload_bytes();
    fn test_field_reload_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reload_bytes) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(reload_bytes))
        );
    }
    test_field_reload_bytes();
    fn test_field_arena_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).arena_bytes) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(arena_bytes))
        );
    }
    test_field_arena_bytes();
    fn test_field_allocations() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).allocations) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(allocations))
        );
    }
    test_field_allocations();
    fn test_field_gathers() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gathers) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(gathers))
        );
    }
    test_field_gathers();
    fn test_field_gather_hits() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gather_hits) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(gather_hits))
        );
    }
    test_field_gather_hits();
    fn test_field_gather_wire_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gather_wire_bytes) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(gather_wire_bytes))
        );
    }
    test_field_gather_wire_bytes();
    fn test_field_reductions() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reductions) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(reductions))
        );
    }
    test_field_reductions();
    fn test_field_reduce_wire_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reduce_wire_bytes) as usize - ptr as usize
            },
            96usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(reduce_wire_bytes))
        );
    }
    test_field_reduce_wire_bytes();
    fn test_field_flushes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).flushes) as usize - ptr as usize
            },
            104usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(flushes))
        );
    }
    test_field_flushes();
    fn test_field_copied_d2h_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).copied_d2h_bytes) as usize - ptr as usize
            },
            112usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(copied_d2h_bytes))
        );
    }
    test_field_copied_d2h_bytes();
    fn test_field_copied_h2d_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).copied_h2d_bytes) as usize - ptr as usize
            },
            120usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(copied_h2d_bytes))
        );
    }
    test_field_copied_h2d_bytes();
    fn test_field_registered_params() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).registered_params) as usize - ptr as usize
            },
            128usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(registered_params))
        );
    }
    test_field_registered_params();
    fn test_field_registered_graphs() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_memory_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).registered_graphs) as usize - ptr as usize
            },
            136usize,
            concat!("Offset of field: ", stringify!(dc_memory_stats), "::", stringify!(registered_graphs))
        );
    }
    test_field_registered_graphs();
}
extern "C" {
    pub fn dc_memory_stats_init(stats: *mut dc_memory_stats, struct_size: usize);
}
extern "C" {
    pub fn dc_context_get_memory_stats(context: *mut dc_context, stats: *mut dc_memory_stats) -> dc_status;
}
extern "C" {
    pub fn dc_context_reset_stats(context: *mut dc_context) -> dc_status;
}
pub const DC_OP_NONE: dc_op = 0;
pub const DC_OP_ALLGATHER_PARAM: dc_op = 1;
pub const DC_OP_PREFETCH_PARAMS_FUSED: dc_op = 2;
pub const DC_OP_WAIT_ALLGATHER: dc_op = 3;
pub const DC_OP_RELEASE_PARAM: dc_op = 4;
pub const DC_OP_REDUCE_GRAD: dc_op = 5;
pub const DC_OP_FREE_TENSORS: dc_op = 6;
pub const DC_OP_OFFLOAD_TENSOR: dc_op = 7;
pub const DC_OP_RELOAD_TENSOR: dc_op = 8;
pub const DC_OP_WAIT_OFFLOAD: dc_op = 9;
pub const DC_OP_WAIT_RELOAD: dc_op = 10;
pub const DC_OP_OFFLOAD_PARAMETER: dc_op = 11;
pub const DC_OP_RELOAD_PARAMETER: dc_op = 12;
pub const DC_OP_END_BACKWARD: dc_op = 13;
pub const DC_OP_TAKE_PARAM: dc_op = 14;
pub const DC_OP_SET_PERSISTENT: dc_op = 15;
pub const DC_OP_REGISTER_GRAPH: dc_op = 16;
pub const DC_OP_INIT: dc_op = 17;
pub const DC_OP_GRADS_FINITE: dc_op = 18;
pub const DC_OP_COMM_ALL_GATHER: dc_op = 32;
pub const DC_OP_COMM_REDUCE_SCATTER: dc_op = 33;
pub const DC_OP_COMM_ALL_REDUCE: dc_op = 34;
pub const DC_OP_COMM_BROADCAST: dc_op = 35;
pub const DC_OP_COMM_BARRIER: dc_op = 36;
pub const DC_OP_COMM_SPLIT: dc_op = 37;
pub const DC_OP_COMM_ALL_TO_ALL: dc_op = 38;
pub const DC_OP_COMM_GATHER: dc_op = 39;
pub const DC_OP_COMM_SCATTER: dc_op = 40;
pub type dc_op = i32;
extern "C" {
    pub fn dc_op_name(op: i32) -> *const ::std::os::raw::c_char;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_op_info {
    pub struct_size: usize,
    pub shape: *const i64,
    pub ndim: i32,
    pub dtype: i32,
    pub host: i32,
    pub reserved0: i32,
    pub device_bytes: i64,
    pub wire_bytes: i64,
}
#[test]
fn bindgen_test_layout_dc_op_info() {
    assert_eq!(::std::mem::size_of::<dc_op_info>(), 48usize, concat!("Size of: ", stringify!(dc_op_info)));
    assert_eq!(::std::mem::align_of::<dc_op_info>(), 8usize, concat!("Alignment of ", stringify!(dc_op_info)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_shape() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).shape) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(shape))
        );
    }
    test_field_shape();
    fn test_field_ndim() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).ndim) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(ndim))
        );
    }
    test_field_ndim();
    fn test_field_dtype() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dtype) as usize - ptr as usize
            },
            20usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(dtype))
        );
    }
    test_field_dtype();
    fn test_field_host() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).host) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(host))
        );
    }
    test_field_host();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            28usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
    fn test_field_device_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).device_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(device_bytes))
        );
    }
    test_field_device_bytes();
    fn test_field_wire_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_op_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).wire_bytes) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_op_info), "::", stringify!(wire_bytes))
        );
    }
    test_field_wire_bytes();
}
impl Default for dc_op_info {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_op_info_init(info: *mut dc_op_info, struct_size: usize);
}
extern "C" {
    pub fn dc_context_dry_run(
        context: *mut dc_context,
        op: i32,
        graph_id: i64,
        id: i64,
        dtype: i32,
        info: *mut dc_op_info,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_trace_event {
    pub begin_ns: i64,
    pub end_ns: i64,
    pub graph_id: i64,
    pub id: i64,
    pub bytes: i64,
    pub op: i32,
    pub lane: i32,
}
#[test]
fn bindgen_test_layout_dc_trace_event() {
    assert_eq!(::std::mem::size_of::<dc_trace_event>(), 48usize, concat!("Size of: ", stringify!(dc_trace_event)));
    assert_eq!(::std::mem::align_of::<dc_trace_event>(), 8usize, concat!("Alignment of ", stringify!(dc_trace_event)));
    fn test_field_begin_ns() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).begin_ns) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(begin_ns))
        );
    }
    test_field_begin_ns();
    fn test_field_end_ns() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).end_ns) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(end_ns))
        );
    }
    test_field_end_ns();
    fn test_field_graph_id() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).graph_id) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(graph_id))
        );
    }
    test_field_graph_id();
    fn test_field_id() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).id) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(id))
        );
    }
    test_field_id();
    fn test_field_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(bytes))
        );
    }
    test_field_bytes();
    fn test_field_op() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).op) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(op))
        );
    }
    test_field_op();
    fn test_field_lane() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_trace_event>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).lane) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_trace_event), "::", stringify!(lane))
        );
    }
    test_field_lane();
}
extern "C" {
    pub fn dc_context_trace_start(context: *mut dc_context, capacity: i64) -> dc_status;
}
extern "C" {
    pub fn dc_context_trace_read(
        context: *mut dc_context,
        events: *mut dc_trace_event,
        event_size: usize,
        cap: i64,
        count: *mut i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_context_trace_dump(context: *mut dc_context, folder: *const ::std::os::raw::c_char) -> dc_status;
}
extern "C" {
    pub fn dc_context_trace_dump_on_error(context: *mut dc_context, folder: *const ::std::os::raw::c_char)
        -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_layer {
    _unused: [u8; 0],
}
pub const DC_GELU_TANH: dc_gelu = 1;
pub const DC_GELU_ERF: dc_gelu = 2;
pub type dc_gelu = i32;
pub const DC_LAYER_ATTN_QKVW: dc_layer_weight = 0;
pub const DC_LAYER_ATTN_QKVB: dc_layer_weight = 1;
pub const DC_LAYER_ATTN_OW: dc_layer_weight = 2;
pub const DC_LAYER_ATTN_OB: dc_layer_weight = 3;
pub const DC_LAYER_ATTN_NW: dc_layer_weight = 4;
pub const DC_LAYER_ATTN_NB: dc_layer_weight = 5;
pub const DC_LAYER_INTER_W: dc_layer_weight = 6;
pub const DC_LAYER_INTER_B: dc_layer_weight = 7;
pub const DC_LAYER_OUTPUT_W: dc_layer_weight = 8;
pub const DC_LAYER_OUTPUT_B: dc_layer_weight = 9;
pub const DC_LAYER_NORM_W: dc_layer_weight = 10;
pub const DC_LAYER_NORM_B: dc_layer_weight = 11;
pub const DC_LAYER_WEIGHTS: dc_layer_weight = 12;
pub type dc_layer_weight = i32;
pub const DC_DROPOUT_ATTENTION: dc_dropout_site = 1;
pub const DC_DROPOUT_PROJECTION: dc_dropout_site = 2;
pub const DC_DROPOUT_OUTPUT: dc_dropout_site = 3;
pub type dc_dropout_site = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_layer_config {
    pub struct_size: usize,
    pub batch_size: i64,
    pub max_seq_length: i64,
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub heads: i64,
    pub attn_dropout_ratio: f64,
    pub hidden_dropout_ratio: f64,
    pub num_hidden_layers: i64,
    pub initializer_range: f64,
    pub layer_norm_eps: f64,
    pub seed: i64,
    pub layer_id: i64,
    pub local_rank: i32,
    pub fp16: i32,
    pub dtype: i32,
    pub grad_dtype: i32,
    pub gelu: i32,
    pub pre_layer_norm: i32,
    pub normalize_invertible: i32,
    pub gelu_checkpoint: i32,
    pub attn_dropout_checkpoint: i32,
    pub adjust_init_range: i32,
    pub stochastic_mode: i32,
    pub training: i32,
    pub threads: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_layer_config() {
    assert_eq!(::std::mem::size_of::<dc_layer_config>(), 160usize, concat!("Size of: ", stringify!(dc_layer_config)));
    assert_eq!(
        ::std::mem::align_of::<dc_layer_config>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_layer_config))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_batch_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).batch_size) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(batch_size))
        );
    }
    test_field_batch_size();
    fn test_field_max_seq_length() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).max_seq_length) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(max_seq_length))
        );
    }
    test_field_max_seq_length();
    fn test_field_hidden_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).hidden_size) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(hidden_size))
        );
    }
    test_field_hidden_size();
    fn test_field_intermediate_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).intermediate_size) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(intermediate_size))
        );
    }
    test_field_intermediate_size();
    fn test_field_heads() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).heads) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(heads))
        );
    }
    test_field_heads();
    fn test_field_attn_dropout_ratio() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).attn_dropout_ratio) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(attn_dropout_ratio))
        );
    }
    test_field_attn_dropout_ratio();
    fn test_field_hidden_dropout_ratio() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).hidden_dropout_ratio) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(hidden_dropout_ratio))
        );
    }
    test_field_hidden_dropout_ratio();
    fn test_field_num_hidden_layers() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).num_hidden_layers) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(num_hidden_layers))
        );
    }
    test_field_num_hidden_layers();
    fn test_field_initializer_range() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).initializer_range) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(initializer_range))
        );
    }
    test_field_initializer_range();
    fn test_field_layer_norm_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).layer_norm_eps) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(layer_norm_eps))
        );
    }
    test_field_layer_norm_eps();
    fn test_field_seed() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).seed) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(seed))
        );
    }
    test_field_seed();
    fn test_field_layer_id() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).layer_id) as usize - ptr as usize
            },
            96usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(layer_id))
        );
    }
    test_field_layer_id();
    fn test_field_local_rank() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).local_rank) as usize - ptr as usize
            },
            104usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(local_rank))
        );
    }
    test_field_local_rank();
    fn test_field_fp16() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).fp16) as usize - ptr as usize
            },
            108usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(fp16))
        );
    }
    test_field_fp16();
    fn test_field_dtype() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dtype) as usize - ptr as usize
            },
            112usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(dtype))
        );
    }
    test_field_dtype();
    fn test_field_grad_dtype() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).grad_dtype) as usize - ptr as usize
            },
            116usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(grad_dtype))
        );
    }
    test_field_grad_dtype();
    fn test_field_gelu() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gelu) as usize - ptr as usize
            },
            120usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(gelu))
        );
    }
    test_field_gelu();
    fn test_field_pre_layer_norm() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).pre_layer_norm) as usize - ptr as usize
            },
            124usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(pre_layer_norm))
        );
    }
    test_field_pre_layer_norm();
    fn test_field_normalize_invertible() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).normalize_invertible) as usize - ptr as usize
            },
            128usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(normalize_invertible))
        );
    }
    test_field_normalize_invertible();
    fn test_field_gelu_checkpoint() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).gelu_checkpoint) as usize - ptr as usize
            },
            132usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(gelu_checkpoint))
        );
    }
    test_field_gelu_checkpoint();
    fn test_field_attn_dropout_checkpoint() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).attn_dropout_checkpoint) as usize - ptr as usize
            },
            136usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(attn_dropout_checkpoint))
        );
    }
    test_field_attn_dropout_checkpoint();
    fn test_field_adjust_init_range() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).adjust_init_range) as usize - ptr as usize
            },
            140usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(adjust_init_range))
        );
    }
    test_field_adjust_init_range();
    fn test_field_stochastic_mode() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).stochastic_mode) as usize - ptr as usize
            },
            144usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(stochastic_mode))
        );
    }
    test_field_stochastic_mode();
    fn test_field_training() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).training) as usize - ptr as usize
            },
            148usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(training))
        );
    }
    test_field_training();
    fn test_field_threads() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).threads) as usize - ptr as usize
            },
            152usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(threads))
        );
    }
    test_field_threads();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_config>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            156usize,
            concat!("Offset of field: ", stringify!(dc_layer_config), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_layer_config_init(config: *mut dc_layer_config, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_layer_call {
    pub struct_size: usize,
    pub batch: i64,
    pub seq_length: i64,
    pub cu_seqlens: *const i32,
    pub mask: *const dc_tensor,
    pub offset: i64,
    pub accumulate: i32,
    pub reserved0: i32,
    pub workspace: *mut ::std::os::raw::c_void,
    pub workspace_bytes: i64,
    pub reserve: *mut ::std::os::raw::c_void,
    pub reserve_bytes: i64,
    pub stream: *mut dc_stream,
}
#[test]
fn bindgen_test_layout_dc_layer_call() {
    assert_eq!(::std::mem::size_of::<dc_layer_call>(), 96usize, concat!("Size of: ", stringify!(dc_layer_call)));
    assert_eq!(::std::mem::align_of::<dc_layer_call>(), 8usize, concat!("Alignment of ", stringify!(dc_layer_call)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_batch() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).batch) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(batch))
        );
    }
    test_field_batch();
    fn test_field_seq_length() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).seq_length) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(seq_length))
        );
    }
    test_field_seq_length();
    fn test_field_cu_seqlens() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).cu_seqlens) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(cu_seqlens))
        );
    }
    test_field_cu_seqlens();
    fn test_field_mask() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).mask) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(mask))
        );
    }
    test_field_mask();
    fn test_field_offset() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).offset) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(offset))
        );
    }
    test_field_offset();
    fn test_field_accumulate() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).accumulate) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(accumulate))
        );
    }
    test_field_accumulate();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
    fn test_field_workspace() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).workspace) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(workspace))
        );
    }
    test_field_workspace();
    fn test_field_workspace_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).workspace_bytes) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(workspace_bytes))
        );
    }
    test_field_workspace_bytes();
    fn test_field_reserve() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserve) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(reserve))
        );
    }
    test_field_reserve();
    fn test_field_reserve_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserve_bytes) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(reserve_bytes))
        );
    }
    test_field_reserve_bytes();
    fn test_field_stream() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_call>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).stream) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_layer_call), "::", stringify!(stream))
        );
    }
    test_field_stream();
}
impl Default for dc_layer_call {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_layer_call_init(call: *mut dc_layer_call, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_layer_cost {
    pub struct_size: usize,
    pub forward_workspace_bytes: i64,
    pub backward_workspace_bytes: i64,
    pub inference_workspace_bytes: i64,
    pub reserve_bytes: i64,
    pub kept_bytes: i64,
    pub forward_flops: i64,
    pub backward_flops: i64,
    pub forward_bytes: i64,
    pub backward_bytes: i64,
}
#[test]
fn bindgen_test_layout_dc_layer_cost() {
    assert_eq!(::std::mem::size_of::<dc_layer_cost>(), 80usize, concat!("Size of: ", stringify!(dc_layer_cost)));
    assert_eq!(::std::mem::align_of::<dc_layer_cost>(), 8usize, concat!("Alignment of ", stringify!(dc_layer_cost)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_forward_workspace_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).forward_workspace_bytes) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(forward_workspace_bytes))
        );
    }
    test_field_forward_workspace_bytes();
    fn test_field_backward_workspace_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).backward_workspace_bytes) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(backward_workspace_bytes))
        );
    }
    test_field_backward_workspace_bytes();
    fn test_field_inference_workspace_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).inference_workspace_bytes) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(inference_workspace_bytes))
        );
    }
    test_field_inference_workspace_bytes();
    fn test_field_reserve_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserve_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(reserve_bytes))
        );
    }
    test_field_reserve_bytes();
    fn test_field_kept_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).kept_bytes) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(kept_bytes))
        );
    }
    test_field_kept_bytes();
    fn test_field_forward_flops() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).forward_flops) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(forward_flops))
        );
    }
    test_field_forward_flops();
    fn test_field_backward_flops() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).backward_flops) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(backward_flops))
        );
    }
    test_field_backward_flops();
    fn test_field_forward_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).forward_bytes) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(forward_bytes))
        );
    }
    test_field_forward_bytes();
    fn test_field_backward_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_cost>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).backward_bytes) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_layer_cost), "::", stringify!(backward_bytes))
        );
    }
    test_field_backward_bytes();
}
extern "C" {
    pub fn dc_layer_cost_init(cost: *mut dc_layer_cost, struct_size: usize);
}
extern "C" {
    pub fn dc_layer_create(
        device: *mut dc_device,
        config: *const dc_layer_config,
        layer: *mut *mut dc_layer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_layer_destroy(layer: *mut dc_layer);
}
extern "C" {
    pub fn dc_layer_get_cost(layer: *const dc_layer, call: *const dc_layer_call, cost: *mut dc_layer_cost)
        -> dc_status;
}
extern "C" {
    pub fn dc_layer_get_weight_shape(layer: *const dc_layer, index: i32, shape: *mut i64, ndim: *mut i32) -> dc_status;
}
extern "C" {
    pub fn dc_layer_init_weights(
        layer: *const dc_layer,
        weights: *mut dc_tensor,
        tensor_size: usize,
        count: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_layer_forward(
        layer: *mut dc_layer,
        call: *const dc_layer_call,
        weights: *const dc_tensor,
        tensor_size: usize,
        count: i64,
        input: *const dc_tensor,
        output: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_layer_inference(
        layer: *mut dc_layer,
        call: *const dc_layer_call,
        weights: *const dc_tensor,
        tensor_size: usize,
        count: i64,
        input: *const dc_tensor,
        output: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_layer_backward(
        layer: *mut dc_layer,
        call: *const dc_layer_call,
        weights: *const dc_tensor,
        tensor_size: usize,
        count: i64,
        input: *const dc_tensor,
        output: *const dc_tensor,
        grad_output: *const dc_tensor,
        grad_input: *mut dc_tensor,
        grad_weights: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_layer_get_dropout_mask(
        layer: *const dc_layer,
        call: *const dc_layer_call,
        site: i32,
        mask: *mut dc_tensor,
        scale: *mut f64,
    ) -> dc_status;
}
pub const DC_LAYER_INVENTORY_LIBDC: dc_layer_inventory = 0;
pub const DC_LAYER_INVENTORY_DEEPSPEED: dc_layer_inventory = 1;
pub type dc_layer_inventory = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_layer_plan_options {
    pub struct_size: usize,
    pub seq_length: i64,
    pub micro_batch: i64,
    pub memory_bytes: i64,
    pub other_bytes: i64,
    pub other_parameters: i64,
    pub ranks: i64,
    pub stage: i32,
    pub moments: i32,
    pub inventory: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_layer_plan_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_layer_plan_options>(),
        72usize,
        concat!("Size of: ", stringify!(dc_layer_plan_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_layer_plan_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_layer_plan_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_seq_length() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).seq_length) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(seq_length))
        );
    }
    test_field_seq_length();
    fn test_field_micro_batch() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).micro_batch) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(micro_batch))
        );
    }
    test_field_micro_batch();
    fn test_field_memory_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).memory_bytes) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(memory_bytes))
        );
    }
    test_field_memory_bytes();
    fn test_field_other_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).other_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(other_bytes))
        );
    }
    test_field_other_bytes();
    fn test_field_other_parameters() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).other_parameters) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(other_parameters))
        );
    }
    test_field_other_parameters();
    fn test_field_ranks() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).ranks) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(ranks))
        );
    }
    test_field_ranks();
    fn test_field_stage() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).stage) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(stage))
        );
    }
    test_field_stage();
    fn test_field_moments() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).moments) as usize - ptr as usize
            },
            60usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(moments))
        );
    }
    test_field_moments();
    fn test_field_inventory() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).inventory) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(inventory))
        );
    }
    test_field_inventory();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            68usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_layer_plan_options_init(options: *mut dc_layer_plan_options, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_layer_plan {
    pub struct_size: usize,
    pub micro_batch: i64,
    pub parameters: i64,
    pub weight_bytes: i64,
    pub grad_bytes: i64,
    pub optimizer_bytes: i64,
    pub working_bytes: i64,
    pub kept_bytes: i64,
    pub workspace_bytes: i64,
    pub total_bytes: i64,
}
#[test]
fn bindgen_test_layout_dc_layer_plan() {
    assert_eq!(::std::mem::size_of::<dc_layer_plan>(), 80usize, concat!("Size of: ", stringify!(dc_layer_plan)));
    assert_eq!(::std::mem::align_of::<dc_layer_plan>(), 8usize, concat!("Alignment of ", stringify!(dc_layer_plan)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_micro_batch() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).micro_batch) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(micro_batch))
        );
    }
    test_field_micro_batch();
    fn test_field_parameters() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).parameters) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(parameters))
        );
    }
    test_field_parameters();
    fn test_field_weight_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_bytes) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(weight_bytes))
        );
    }
    test_field_weight_bytes();
    fn test_field_grad_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).grad_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(grad_bytes))
        );
    }
    test_field_grad_bytes();
    fn test_field_optimizer_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).optimizer_bytes) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(optimizer_bytes))
        );
    }
    test_field_optimizer_bytes();
    fn test_field_working_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).working_bytes) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(working_bytes))
        );
    }
    test_field_working_bytes();
    fn test_field_kept_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).kept_bytes) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(kept_bytes))
        );
    }
    test_field_kept_bytes();
    fn test_field_workspace_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).workspace_bytes) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(workspace_bytes))
        );
    }
    test_field_workspace_bytes();
    fn test_field_total_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_layer_plan>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).total_bytes) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_layer_plan), "::", stringify!(total_bytes))
        );
    }
    test_field_total_bytes();
}
extern "C" {
    pub fn dc_layer_plan_init(plan: *mut dc_layer_plan, struct_size: usize);
}
extern "C" {
    pub fn dc_layer_get_plan(
        config: *const dc_layer_config,
        options: *const dc_layer_plan_options,
        plan: *mut dc_layer_plan,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_linalg {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_linalg_options {
    pub struct_size: usize,
    pub threads: i32,
    pub plain: i32,
}
#[test]
fn bindgen_test_layout_dc_linalg_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_linalg_options>(),
        16usize,
        concat!("Size of: ", stringify!(dc_linalg_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_linalg_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_linalg_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_linalg_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_linalg_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_threads() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_linalg_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).threads) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_linalg_options), "::", stringify!(threads))
        );
    }
    test_field_threads();
    fn test_field_plain() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_linalg_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).plain) as usize - ptr as usize
            },
            12usize,
            concat!("Offset of field: ", stringify!(dc_linalg_options), "::", stringify!(plain))
        );
    }
    test_field_plain();
}
extern "C" {
    pub fn dc_linalg_options_init(options: *mut dc_linalg_options, struct_size: usize);
}
extern "C" {
    pub fn dc_linalg_create(
        device: *mut dc_device,
        options: *const dc_linalg_options,
        linalg: *mut *mut dc_linalg,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_linalg_destroy(linalg: *mut dc_linalg);
}
extern "C" {
    pub fn dc_linalg_solver(linalg: *const dc_linalg) -> *const ::std::os::raw::c_char;
}
extern "C" {
    pub fn dc_linalg_begin_query(linalg: *mut dc_linalg) -> dc_status;
}
extern "C" {
    pub fn dc_linalg_end_query(linalg: *mut dc_linalg, bytes: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_linalg_set_workspace(
        linalg: *mut dc_linalg,
        memory: *mut ::std::os::raw::c_void,
        bytes: i64,
    ) -> dc_status;
}
pub const DC_SYMMETRY_CHECK: dc_symmetry = 0;
pub const DC_SYMMETRY_MEAN: dc_symmetry = 1;
pub const DC_SYMMETRY_LOWER: dc_symmetry = 2;
pub const DC_SYMMETRY_UPPER: dc_symmetry = 3;
pub type dc_symmetry = i32;
pub const DC_NEGATIVE_REFUSE: dc_negative = 0;
pub const DC_NEGATIVE_CLAMP: dc_negative = 1;
pub const DC_NEGATIVE_FLOOR: dc_negative = 2;
pub type dc_negative = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_spectral_options {
    pub struct_size: usize,
    pub eps_abs: f64,
    pub eps_rel: f64,
    pub rank_rtol: f64,
    pub tolerance: f64,
    pub symmetry: i32,
    pub negative: i32,
    pub precision: i32,
    pub descending: i32,
}
#[test]
fn bindgen_test_layout_dc_spectral_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_spectral_options>(),
        56usize,
        concat!("Size of: ", stringify!(dc_spectral_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_spectral_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_spectral_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_eps_abs() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_abs) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(eps_abs))
        );
    }
    test_field_eps_abs();
    fn test_field_eps_rel() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_rel) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(eps_rel))
        );
    }
    test_field_eps_rel();
    fn test_field_rank_rtol() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).rank_rtol) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(rank_rtol))
        );
    }
    test_field_rank_rtol();
    fn test_field_tolerance() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tolerance) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(tolerance))
        );
    }
    test_field_tolerance();
    fn test_field_symmetry() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).symmetry) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(symmetry))
        );
    }
    test_field_symmetry();
    fn test_field_negative() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).negative) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(negative))
        );
    }
    test_field_negative();
    fn test_field_precision() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).precision) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(precision))
        );
    }
    test_field_precision();
    fn test_field_descending() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).descending) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_spectral_options), "::", stringify!(descending))
        );
    }
    test_field_descending();
}
extern "C" {
    pub fn dc_spectral_options_init(options: *mut dc_spectral_options, struct_size: usize);
}
pub const DC_PATH_NONE: dc_spectral_path = 0;
pub const DC_PATH_FRESH: dc_spectral_path = 1;
pub const DC_PATH_RETRIED: dc_spectral_path = 2;
pub const DC_PATH_PLAIN: dc_spectral_path = 3;
pub const DC_PATH_WARM: dc_spectral_path = 4;
pub type dc_spectral_path = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_spectral_info {
    pub status: i32,
    pub path: i32,
    pub smallest: f64,
    pub largest: f64,
    pub epsilon: f64,
    pub asymmetry: f64,
    pub change: f64,
}
#[test]
fn bindgen_test_layout_dc_spectral_info() {
    assert_eq!(::std::mem::size_of::<dc_spectral_info>(), 48usize, concat!("Size of: ", stringify!(dc_spectral_info)));
    assert_eq!(
        ::std::mem::align_of::<dc_spectral_info>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_spectral_info))
    );
    fn test_field_status() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).status) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(status))
        );
    }
    test_field_status();
    fn test_field_path() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).path) as usize - ptr as usize
            },
            4usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(path))
        );
    }
    test_field_path();
    fn test_field_smallest() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).smallest) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(smallest))
        );
    }
    test_field_smallest();
    fn test_field_largest() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).largest) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(largest))
        );
    }
    test_field_largest();
    fn test_field_epsilon() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).epsilon) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(epsilon))
        );
    }
    test_field_epsilon();
    fn test_field_asymmetry() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).asymmetry) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(asymmetry))
        );
    }
    test_field_asymmetry();
    fn test_field_change() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_spectral_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).change) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_spectral_info), "::", stringify!(change))
        );
    }
    test_field_change();
}
extern "C" {
    pub fn dc_eigh(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        options: *const dc_spectral_options,
        values: *mut dc_tensor,
        vectors: *mut dc_tensor,
        info: *mut dc_spectral_info,
        info_size: usize,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_matrix_power(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        power: f64,
        options: *const dc_spectral_options,
        out: *mut dc_tensor,
        info: *mut dc_spectral_info,
        info_size: usize,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_matrix_inverse_root(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        root: i32,
        options: *const dc_spectral_options,
        basis: *mut dc_tensor,
        out: *mut dc_tensor,
        info: *mut dc_spectral_info,
        info_size: usize,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_iteration_options {
    pub struct_size: usize,
    pub eps_abs: f64,
    pub eps_rel: f64,
    pub residual: f64,
    pub iterations: i32,
    pub symmetry: i32,
    pub precision: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_iteration_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_iteration_options>(),
        48usize,
        concat!("Size of: ", stringify!(dc_iteration_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_iteration_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_iteration_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_eps_abs() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_abs) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(eps_abs))
        );
    }
    test_field_eps_abs();
    fn test_field_eps_rel() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_rel) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(eps_rel))
        );
    }
    test_field_eps_rel();
    fn test_field_residual() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).residual) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(residual))
        );
    }
    test_field_residual();
    fn test_field_iterations() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).iterations) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(iterations))
        );
    }
    test_field_iterations();
    fn test_field_symmetry() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).symmetry) as usize - ptr as usize
            },
            36usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(symmetry))
        );
    }
    test_field_symmetry();
    fn test_field_precision() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).precision) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(precision))
        );
    }
    test_field_precision();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_iteration_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_iteration_options_init(options: *mut dc_iteration_options, struct_size: usize);
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_iteration_info {
    pub status: i32,
    pub iterations: i32,
    pub residual: f64,
    pub bound: f64,
    pub epsilon: f64,
    pub asymmetry: f64,
}
#[test]
fn bindgen_test_layout_dc_iteration_info() {
    assert_eq!(
        ::std::mem::size_of::<dc_iteration_info>(),
        40usize,
        concat!("Size of: ", stringify!(dc_iteration_info))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_iteration_info>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_iteration_info))
    );
    fn test_field_status() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).status) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(status))
        );
    }
    test_field_status();
    fn test_field_iterations() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).iterations) as usize - ptr as usize
            },
            4usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(iterations))
        );
    }
    test_field_iterations();
    fn test_field_residual() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).residual) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(residual))
        );
    }
    test_field_residual();
    fn test_field_bound() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).bound) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(bound))
        );
    }
    test_field_bound();
    fn test_field_epsilon() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).epsilon) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(epsilon))
        );
    }
    test_field_epsilon();
    fn test_field_asymmetry() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_iteration_info>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).asymmetry) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_iteration_info), "::", stringify!(asymmetry))
        );
    }
    test_field_asymmetry();
}
extern "C" {
    pub fn dc_matrix_inverse_root_newton(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        root: i32,
        options: *const dc_iteration_options,
        out: *mut dc_tensor,
        info: *mut dc_iteration_info,
        info_size: usize,
    ) -> dc_status;
}
pub const DC_ORTHOGONAL_EXPRESS: dc_orthogonal = 0;
pub const DC_ORTHOGONAL_MUON: dc_orthogonal = 1;
pub type dc_orthogonal = i32;
extern "C" {
    pub fn dc_orthogonalize(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        polynomial: i32,
        steps: i32,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_kron(linalg: *mut dc_linalg, a: *const dc_tensor, b: *const dc_tensor, out: *mut dc_tensor) -> dc_status;
}
extern "C" {
    pub fn dc_kron_apply(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        b: *const dc_tensor,
        x: *const dc_tensor,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_kron_solve(
        linalg: *mut dc_linalg,
        a_vectors: *const dc_tensor,
        a_values: *const dc_tensor,
        b_vectors: *const dc_tensor,
        b_values: *const dc_tensor,
        damping: f64,
        x: *const dc_tensor,
        out: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_kron_nearest(
        linalg: *mut dc_linalg,
        x: *const dc_tensor,
        a: *mut dc_tensor,
        b: *mut dc_tensor,
        residual: *mut f64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_batch_matmul(
        linalg: *mut dc_linalg,
        a: *const dc_tensor,
        b: *const dc_tensor,
        alpha: f64,
        beta: f64,
        out: *mut dc_tensor,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_matrix_source {
    pub struct_size: usize,
    pub tensor: *mut dc_tensor,
    pub offset: i64,
    pub fd: i32,
    pub in_file: i32,
}
#[test]
fn bindgen_test_layout_dc_matrix_source() {
    assert_eq!(::std::mem::size_of::<dc_matrix_source>(), 32usize, concat!("Size of: ", stringify!(dc_matrix_source)));
    assert_eq!(
        ::std::mem::align_of::<dc_matrix_source>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_matrix_source))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_matrix_source>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_matrix_source), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_tensor() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_matrix_source>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tensor) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_matrix_source), "::", stringify!(tensor))
        );
    }
    test_field_tensor();
    fn test_field_offset() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_matrix_source>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).offset) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_matrix_source), "::", stringify!(offset))
        );
    }
    test_field_offset();
    fn test_field_fd() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_matrix_source>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).fd) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_matrix_source), "::", stringify!(fd))
        );
    }
    test_field_fd();
    fn test_field_in_file() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_matrix_source>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).in_file) as usize - ptr as usize
            },
            28usize,
            concat!("Offset of field: ", stringify!(dc_matrix_source), "::", stringify!(in_file))
        );
    }
    test_field_in_file();
}
impl Default for dc_matrix_source {
    fn default() -> Self {
        let mut s = ::std::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::std::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
extern "C" {
    pub fn dc_matrix_source_init(source: *mut dc_matrix_source, struct_size: usize);
}
extern "C" {
    pub fn dc_matmul_bounded(
        linalg: *mut dc_linalg,
        a: *const dc_matrix_source,
        b: *const dc_matrix_source,
        out: *mut dc_matrix_source,
        budget_bytes: i64,
        needed: *mut i64,
    ) -> dc_status;
}
pub const DC_SAMPLE_LINEAR: dc_sample_kind = 1;
pub const DC_SAMPLE_CONV: dc_sample_kind = 2;
pub const DC_SAMPLE_EMBEDDING: dc_sample_kind = 3;
pub const DC_SAMPLE_LAYER_NORM: dc_sample_kind = 4;
pub const DC_SAMPLE_RMS_NORM: dc_sample_kind = 5;
pub const DC_SAMPLE_BAG_SUM: dc_sample_kind = 6;
pub const DC_SAMPLE_BAG_MEAN: dc_sample_kind = 7;
pub const DC_SAMPLE_GROUP_NORM: dc_sample_kind = 8;
pub type dc_sample_kind = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_sample_layer {
    pub struct_size: usize,
    pub kind: i32,
    pub groups: i32,
    pub kernel: [i64; 3usize],
    pub stride: [i64; 3usize],
    pub padding: [i64; 3usize],
    pub dilation: [i64; 3usize],
    pub rows: i64,
    pub padding_row: i64,
    pub features: i64,
    pub eps: f64,
    pub has_padding_row: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_sample_layer() {
    assert_eq!(::std::mem::size_of::<dc_sample_layer>(), 152usize, concat!("Size of: ", stringify!(dc_sample_layer)));
    assert_eq!(
        ::std::mem::align_of::<dc_sample_layer>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_sample_layer))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_kind() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).kind) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(kind))
        );
    }
    test_field_kind();
    fn test_field_groups() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).groups) as usize - ptr as usize
            },
            12usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(groups))
        );
    }
    test_field_groups();
    fn test_field_kernel() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).kernel) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(kernel))
        );
    }
    test_field_kernel();
    fn test_field_stride() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).stride) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(stride))
        );
    }
    test_field_stride();
    fn test_field_padding() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).padding) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(padding))
        );
    }
    test_field_padding();
    fn test_field_dilation() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dilation) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(dilation))
        );
    }
    test_field_dilation();
    fn test_field_rows() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).rows) as usize - ptr as usize
            },
            112usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(rows))
        );
    }
    test_field_rows();
    fn test_field_padding_row() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).padding_row) as usize - ptr as usize
            },
            120usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(padding_row))
        );
    }
    test_field_padding_row();
    fn test_field_features() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).features) as usize - ptr as usize
            },
            128usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(features))
        );
    }
    test_field_features();
    fn test_field_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps) as usize - ptr as usize
            },
            136usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(eps))
        );
    }
    test_field_eps();
    fn test_field_has_padding_row() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).has_padding_row) as usize - ptr as usize
            },
            144usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(has_padding_row))
        );
    }
    test_field_has_padding_row();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sample_layer>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            148usize,
            concat!("Offset of field: ", stringify!(dc_sample_layer), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_sample_layer_init(layer: *mut dc_sample_layer, struct_size: usize);
}
extern "C" {
    pub fn dc_per_sample_grads(
        linalg: *mut dc_linalg,
        layer: *const dc_sample_layer,
        x: *const dc_tensor,
        delta: *const dc_tensor,
        weight: *mut dc_tensor,
        bias: *mut dc_tensor,
    ) -> dc_status;
}
pub const DC_PART_WEIGHT: dc_sample_part = 1;
pub const DC_PART_BIAS: dc_sample_part = 2;
pub type dc_sample_part = i32;
extern "C" {
    pub fn dc_per_sample_norms(
        linalg: *mut dc_linalg,
        layer: *const dc_sample_layer,
        x: *const dc_tensor,
        delta: *const dc_tensor,
        parts: i32,
        accumulate: i32,
        squares: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_clip_factors(
        linalg: *mut dc_linalg,
        squares: *const dc_tensor,
        max_norm: f64,
        factors: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_clipped_grad_sum(
        linalg: *mut dc_linalg,
        layer: *const dc_sample_layer,
        x: *const dc_tensor,
        delta: *const dc_tensor,
        factors: *const dc_tensor,
        accumulate: i32,
        weight: *mut dc_tensor,
        bias: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_is_cuda_available() -> i32;
}
extern "C" {
    pub fn dc_device_count(kind: *const ::std::os::raw::c_char) -> i32;
}
extern "C" {
    pub fn dc_get_optimal_device(reason: *mut *const ::std::os::raw::c_char) -> *const ::std::os::raw::c_char;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_device_memory {
    pub struct_size: usize,
    pub total_bytes: i64,
    pub free_bytes: i64,
    pub reserved_bytes: i64,
    pub peak_bytes: i64,
}
#[test]
fn bindgen_test_layout_dc_device_memory() {
    assert_eq!(::std::mem::size_of::<dc_device_memory>(), 40usize, concat!("Size of: ", stringify!(dc_device_memory)));
    assert_eq!(
        ::std::mem::align_of::<dc_device_memory>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_device_memory))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_memory>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_device_memory), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_total_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_memory>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).total_bytes) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_device_memory), "::", stringify!(total_bytes))
        );
    }
    test_field_total_bytes();
    fn test_field_free_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_memory>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).free_bytes) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_device_memory), "::", stringify!(free_bytes))
        );
    }
    test_field_free_bytes();
    fn test_field_reserved_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_memory>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved_bytes) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_device_memory), "::", stringify!(reserved_bytes))
        );
    }
    test_field_reserved_bytes();
    fn test_field_peak_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_device_memory>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).peak_bytes) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_device_memory), "::", stringify!(peak_bytes))
        );
    }
    test_field_peak_bytes();
}
extern "C" {
    pub fn dc_device_memory_init(memory: *mut dc_device_memory, struct_size: usize);
}
extern "C" {
    pub fn dc_device_get_memory(device: *mut dc_device, memory: *mut dc_device_memory) -> dc_status;
}
extern "C" {
    pub fn dc_tensor_create(
        device: *mut dc_device,
        shape: *const i64,
        ndim: i32,
        dtype: i32,
        out: *mut dc_tensor,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dc_optimizer {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_adamw_options {
    pub struct_size: usize,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub amsgrad: i32,
    pub maximize: i32,
    pub check_finite: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_adamw_options() {
    assert_eq!(::std::mem::size_of::<dc_adamw_options>(), 56usize, concat!("Size of: ", stringify!(dc_adamw_options)));
    assert_eq!(
        ::std::mem::align_of::<dc_adamw_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_adamw_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_beta1() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta1) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(beta1))
        );
    }
    test_field_beta1();
    fn test_field_beta2() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta2) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(beta2))
        );
    }
    test_field_beta2();
    fn test_field_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(eps))
        );
    }
    test_field_eps();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_amsgrad() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).amsgrad) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(amsgrad))
        );
    }
    test_field_amsgrad();
    fn test_field_maximize() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).maximize) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(maximize))
        );
    }
    test_field_maximize();
    fn test_field_check_finite() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).check_finite) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(check_finite))
        );
    }
    test_field_check_finite();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_adamw_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_adamw_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_adamw_options_init(options: *mut dc_adamw_options, struct_size: usize);
}
extern "C" {
    pub fn dc_adamw_create(
        linalg: *mut dc_linalg,
        options: *const dc_adamw_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_adamw_set_group(optimizer: *mut dc_optimizer, group: i32, options: *const dc_adamw_options) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_sgd_options {
    pub struct_size: usize,
    pub momentum: f64,
    pub dampening: f64,
    pub weight_decay: f64,
    pub nesterov: i32,
    pub maximize: i32,
    pub check_finite: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_sgd_options() {
    assert_eq!(::std::mem::size_of::<dc_sgd_options>(), 48usize, concat!("Size of: ", stringify!(dc_sgd_options)));
    assert_eq!(::std::mem::align_of::<dc_sgd_options>(), 8usize, concat!("Alignment of ", stringify!(dc_sgd_options)));
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_momentum() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).momentum) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(momentum))
        );
    }
    test_field_momentum();
    fn test_field_dampening() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).dampening) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(dampening))
        );
    }
    test_field_dampening();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_nesterov() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).nesterov) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(nesterov))
        );
    }
    test_field_nesterov();
    fn test_field_maximize() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).maximize) as usize - ptr as usize
            },
            36usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(maximize))
        );
    }
    test_field_maximize();
    fn test_field_check_finite() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).check_finite) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(check_finite))
        );
    }
    test_field_check_finite();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_sgd_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_sgd_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_sgd_options_init(options: *mut dc_sgd_options, struct_size: usize);
}
extern "C" {
    pub fn dc_sgd_create(
        linalg: *mut dc_linalg,
        options: *const dc_sgd_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_sgd_set_group(optimizer: *mut dc_optimizer, group: i32, options: *const dc_sgd_options) -> dc_status;
}
pub const DC_GRAFT_ADAM: dc_graft = 0;
pub const DC_GRAFT_NONE: dc_graft = 1;
pub const DC_GRAFT_SGD: dc_graft = 2;
pub const DC_GRAFT_ADAGRAD: dc_graft = 3;
pub const DC_GRAFT_RMSPROP: dc_graft = 4;
pub type dc_graft = i32;
pub const DC_DECAY_DECOUPLED: dc_weight_decay = 0;
pub const DC_DECAY_L2: dc_weight_decay = 1;
pub type dc_weight_decay = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_shampoo_options {
    pub struct_size: usize,
    pub beta1: f64,
    pub beta2: f64,
    pub eps_abs: f64,
    pub eps_rel: f64,
    pub tolerance: f64,
    pub graft_beta2: f64,
    pub graft_eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub max_block: i64,
    pub merge_below: i64,
    pub precondition_frequency: i64,
    pub start_preconditioning_step: i64,
    pub root: i32,
    pub graft: i32,
    pub decay: i32,
    pub nesterov: i32,
    pub tolerated_failures: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_shampoo_options() {
    assert_eq!(
        ::std::mem::size_of::<dc_shampoo_options>(),
        136usize,
        concat!("Size of: ", stringify!(dc_shampoo_options))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_shampoo_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_shampoo_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_beta1() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta1) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(beta1))
        );
    }
    test_field_beta1();
    fn test_field_beta2() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta2) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(beta2))
        );
    }
    test_field_beta2();
    fn test_field_eps_abs() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_abs) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(eps_abs))
        );
    }
    test_field_eps_abs();
    fn test_field_eps_rel() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps_rel) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(eps_rel))
        );
    }
    test_field_eps_rel();
    fn test_field_tolerance() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tolerance) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(tolerance))
        );
    }
    test_field_tolerance();
    fn test_field_graft_beta2() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).graft_beta2) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(graft_beta2))
        );
    }
    test_field_graft_beta2();
    fn test_field_graft_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).graft_eps) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(graft_eps))
        );
    }
    test_field_graft_eps();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_momentum() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).momentum) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(momentum))
        );
    }
    test_field_momentum();
    fn test_field_max_block() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).max_block) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(max_block))
        );
    }
    test_field_max_block();
    fn test_field_merge_below() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).merge_below) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(merge_below))
        );
    }
    test_field_merge_below();
    fn test_field_precondition_frequency() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).precondition_frequency) as usize - ptr as usize
            },
            96usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(precondition_frequency))
        );
    }
    test_field_precondition_frequency();
    fn test_field_start_preconditioning_step() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).start_preconditioning_step) as usize - ptr as usize
            },
            104usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(start_preconditioning_step))
        );
    }
    test_field_start_preconditioning_step();
    fn test_field_root() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).root) as usize - ptr as usize
            },
            112usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(root))
        );
    }
    test_field_root();
    fn test_field_graft() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).graft) as usize - ptr as usize
            },
            116usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(graft))
        );
    }
    test_field_graft();
    fn test_field_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).decay) as usize - ptr as usize
            },
            120usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(decay))
        );
    }
    test_field_decay();
    fn test_field_nesterov() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).nesterov) as usize - ptr as usize
            },
            124usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(nesterov))
        );
    }
    test_field_nesterov();
    fn test_field_tolerated_failures() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tolerated_failures) as usize - ptr as usize
            },
            128usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(tolerated_failures))
        );
    }
    test_field_tolerated_failures();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_shampoo_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            132usize,
            concat!("Offset of field: ", stringify!(dc_shampoo_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_shampoo_options_init(options: *mut dc_shampoo_options, struct_size: usize);
}
extern "C" {
    pub fn dc_shampoo_create(
        linalg: *mut dc_linalg,
        comm: *mut dc_comm,
        options: *const dc_shampoo_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_shampoo_set_group(
        optimizer: *mut dc_optimizer,
        group: i32,
        options: *const dc_shampoo_options,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_soap_options {
    pub struct_size: usize,
    pub beta1: f64,
    pub beta2: f64,
    pub shampoo_beta: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub max_block: i64,
    pub merge_below: i64,
    pub max_precond_dim: i64,
    pub precondition_frequency: i64,
    pub tolerated_failures: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_soap_options() {
    assert_eq!(::std::mem::size_of::<dc_soap_options>(), 88usize, concat!("Size of: ", stringify!(dc_soap_options)));
    assert_eq!(
        ::std::mem::align_of::<dc_soap_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_soap_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_beta1() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta1) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(beta1))
        );
    }
    test_field_beta1();
    fn test_field_beta2() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).beta2) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(beta2))
        );
    }
    test_field_beta2();
    fn test_field_shampoo_beta() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).shampoo_beta) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(shampoo_beta))
        );
    }
    test_field_shampoo_beta();
    fn test_field_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(eps))
        );
    }
    test_field_eps();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_max_block() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).max_block) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(max_block))
        );
    }
    test_field_max_block();
    fn test_field_merge_below() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).merge_below) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(merge_below))
        );
    }
    test_field_merge_below();
    fn test_field_max_precond_dim() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).max_precond_dim) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(max_precond_dim))
        );
    }
    test_field_max_precond_dim();
    fn test_field_precondition_frequency() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).precondition_frequency) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(precondition_frequency))
        );
    }
    test_field_precondition_frequency();
    fn test_field_tolerated_failures() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tolerated_failures) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(tolerated_failures))
        );
    }
    test_field_tolerated_failures();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_soap_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            84usize,
            concat!("Offset of field: ", stringify!(dc_soap_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_soap_options_init(options: *mut dc_soap_options, struct_size: usize);
}
extern "C" {
    pub fn dc_soap_create(
        linalg: *mut dc_linalg,
        comm: *mut dc_comm,
        options: *const dc_soap_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_soap_set_group(optimizer: *mut dc_optimizer, group: i32, options: *const dc_soap_options) -> dc_status;
}
pub const DC_MUON_ORIGINAL: dc_muon_adjust = 0;
pub const DC_MUON_MATCH_RMS: dc_muon_adjust = 1;
pub const DC_MUON_PLAIN: dc_muon_adjust = 2;
pub type dc_muon_adjust = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_muon_options {
    pub struct_size: usize,
    pub momentum: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub num_splits: i64,
    pub polynomial: i32,
    pub steps: i32,
    pub precision: i32,
    pub adjust: i32,
    pub nesterov: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_muon_options() {
    assert_eq!(::std::mem::size_of::<dc_muon_options>(), 64usize, concat!("Size of: ", stringify!(dc_muon_options)));
    assert_eq!(
        ::std::mem::align_of::<dc_muon_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_muon_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_momentum() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).momentum) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(momentum))
        );
    }
    test_field_momentum();
    fn test_field_eps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).eps) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(eps))
        );
    }
    test_field_eps();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_num_splits() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).num_splits) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(num_splits))
        );
    }
    test_field_num_splits();
    fn test_field_polynomial() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).polynomial) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(polynomial))
        );
    }
    test_field_polynomial();
    fn test_field_steps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).steps) as usize - ptr as usize
            },
            44usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(steps))
        );
    }
    test_field_steps();
    fn test_field_precision() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).precision) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(precision))
        );
    }
    test_field_precision();
    fn test_field_adjust() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).adjust) as usize - ptr as usize
            },
            52usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(adjust))
        );
    }
    test_field_adjust();
    fn test_field_nesterov() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).nesterov) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(nesterov))
        );
    }
    test_field_nesterov();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_muon_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            60usize,
            concat!("Offset of field: ", stringify!(dc_muon_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_muon_options_init(options: *mut dc_muon_options, struct_size: usize);
}
extern "C" {
    pub fn dc_muon_create(
        linalg: *mut dc_linalg,
        comm: *mut dc_comm,
        options: *const dc_muon_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_muon_set_group(optimizer: *mut dc_optimizer, group: i32, options: *const dc_muon_options) -> dc_status;
}
pub const DC_KFAC_EIGEN: dc_kfac_inverse = 0;
pub const DC_KFAC_FACTORED: dc_kfac_inverse = 1;
pub type dc_kfac_inverse = i32;
pub const DC_KFAC_EXPAND: dc_kfac_approximation = 0;
pub const DC_KFAC_REDUCE: dc_kfac_approximation = 1;
pub type dc_kfac_approximation = i32;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_kfac_options {
    pub struct_size: usize,
    pub decay: f64,
    pub damping: f64,
    pub kl_clip: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub factor_frequency: i64,
    pub refresh_frequency: i64,
    pub inverse: i32,
    pub nesterov: i32,
    pub tolerated_failures: i32,
    pub reserved0: i32,
}
#[test]
fn bindgen_test_layout_dc_kfac_options() {
    assert_eq!(::std::mem::size_of::<dc_kfac_options>(), 80usize, concat!("Size of: ", stringify!(dc_kfac_options)));
    assert_eq!(
        ::std::mem::align_of::<dc_kfac_options>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_kfac_options))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).decay) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(decay))
        );
    }
    test_field_decay();
    fn test_field_damping() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).damping) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(damping))
        );
    }
    test_field_damping();
    fn test_field_kl_clip() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).kl_clip) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(kl_clip))
        );
    }
    test_field_kl_clip();
    fn test_field_momentum() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).momentum) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(momentum))
        );
    }
    test_field_momentum();
    fn test_field_weight_decay() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).weight_decay) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(weight_decay))
        );
    }
    test_field_weight_decay();
    fn test_field_factor_frequency() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).factor_frequency) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(factor_frequency))
        );
    }
    test_field_factor_frequency();
    fn test_field_refresh_frequency() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).refresh_frequency) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(refresh_frequency))
        );
    }
    test_field_refresh_frequency();
    fn test_field_inverse() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).inverse) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(inverse))
        );
    }
    test_field_inverse();
    fn test_field_nesterov() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).nesterov) as usize - ptr as usize
            },
            68usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(nesterov))
        );
    }
    test_field_nesterov();
    fn test_field_tolerated_failures() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).tolerated_failures) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(tolerated_failures))
        );
    }
    test_field_tolerated_failures();
    fn test_field_reserved0() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_kfac_options>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).reserved0) as usize - ptr as usize
            },
            76usize,
            concat!("Offset of field: ", stringify!(dc_kfac_options), "::", stringify!(reserved0))
        );
    }
    test_field_reserved0();
}
extern "C" {
    pub fn dc_kfac_options_init(options: *mut dc_kfac_options, struct_size: usize);
}
extern "C" {
    pub fn dc_kfac_create(
        linalg: *mut dc_linalg,
        comm: *mut dc_comm,
        options: *const dc_kfac_options,
        optimizer: *mut *mut dc_optimizer,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_kfac_set_group(optimizer: *mut dc_optimizer, group: i32, options: *const dc_kfac_options) -> dc_status;
}
extern "C" {
    pub fn dc_kfac_add_layer(
        optimizer: *mut dc_optimizer,
        layer: *const dc_sample_layer,
        approximation: i32,
        weight: i64,
        bias: i64,
        index: *mut i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_kfac_accumulate(
        optimizer: *mut dc_optimizer,
        index: i64,
        x: *const dc_tensor,
        delta: *const dc_tensor,
        loss_scale: f64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_destroy(optimizer: *mut dc_optimizer);
}
extern "C" {
    pub fn dc_optimizer_set_lr(optimizer: *mut dc_optimizer, group: i32, lr: f64) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_add_param(
        optimizer: *mut dc_optimizer,
        group: i32,
        shape: *const i64,
        ndim: i32,
        offset: i64,
        count: i64,
        dtype: i32,
        index: *mut i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_step(
        optimizer: *mut dc_optimizer,
        weights: *mut dc_tensor,
        grads: *const dc_tensor,
        tensor_size: usize,
        count: i64,
        grad_scale: f64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_set_loss_scale(
        optimizer: *mut dc_optimizer,
        loss_scale: *const dc_tensor,
        found_inf: *const dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_set_stream(optimizer: *mut dc_optimizer, stream: *mut dc_stream) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_get_steps(optimizer: *mut dc_optimizer, steps: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_get_state_name(
        optimizer: *mut dc_optimizer,
        index: i64,
        piece: i64,
        name: *mut *const ::std::os::raw::c_char,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_get_state(
        optimizer: *mut dc_optimizer,
        index: i64,
        name: *const ::std::os::raw::c_char,
        view: *mut dc_tensor,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_get_save_bytes(optimizer: *mut dc_optimizer, bytes: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_save(
        optimizer: *mut dc_optimizer,
        memory: *mut ::std::os::raw::c_void,
        bytes: i64,
    ) -> dc_status;
}
extern "C" {
    pub fn dc_optimizer_load(
        optimizer: *mut dc_optimizer,
        memory: *const ::std::os::raw::c_void,
        bytes: i64,
    ) -> dc_status;
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dc_optimizer_stats {
    pub struct_size: usize,
    pub steps: i64,
    pub params: i64,
    pub blocks: i64,
    pub owned_blocks: i64,
    pub refreshes: i64,
    pub warm_refreshes: i64,
    pub failed_refreshes: i64,
    pub state_bytes: i64,
    pub scratch_bytes: i64,
    pub wire_bytes: i64,
    pub refresh_ns: i64,
    pub skipped_steps: i64,
}
#[test]
fn bindgen_test_layout_dc_optimizer_stats() {
    assert_eq!(
        ::std::mem::size_of::<dc_optimizer_stats>(),
        104usize,
        concat!("Size of: ", stringify!(dc_optimizer_stats))
    );
    assert_eq!(
        ::std::mem::align_of::<dc_optimizer_stats>(),
        8usize,
        concat!("Alignment of ", stringify!(dc_optimizer_stats))
    );
    fn test_field_struct_size() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).struct_size) as usize - ptr as usize
            },
            0usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(struct_size))
        );
    }
    test_field_struct_size();
    fn test_field_steps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).steps) as usize - ptr as usize
            },
            8usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(steps))
        );
    }
    test_field_steps();
    fn test_field_params() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).params) as usize - ptr as usize
            },
            16usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(params))
        );
    }
    test_field_params();
    fn test_field_blocks() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).blocks) as usize - ptr as usize
            },
            24usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(blocks))
        );
    }
    test_field_blocks();
    fn test_field_owned_blocks() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).owned_blocks) as usize - ptr as usize
            },
            32usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(owned_blocks))
        );
    }
    test_field_owned_blocks();
    fn test_field_refreshes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).refreshes) as usize - ptr as usize
            },
            40usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(refreshes))
        );
    }
    test_field_refreshes();
    fn test_field_warm_refreshes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).warm_refreshes) as usize - ptr as usize
            },
            48usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(warm_refreshes))
        );
    }
    test_field_warm_refreshes();
    fn test_field_failed_refreshes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).failed_refreshes) as usize - ptr as usize
            },
            56usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(failed_refreshes))
        );
    }
    test_field_failed_refreshes();
    fn test_field_state_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).state_bytes) as usize - ptr as usize
            },
            64usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(state_bytes))
        );
    }
    test_field_state_bytes();
    fn test_field_scratch_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).scratch_bytes) as usize - ptr as usize
            },
            72usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(scratch_bytes))
        );
    }
    test_field_scratch_bytes();
    fn test_field_wire_bytes() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).wire_bytes) as usize - ptr as usize
            },
            80usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(wire_bytes))
        );
    }
    test_field_wire_bytes();
    fn test_field_refresh_ns() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).refresh_ns) as usize - ptr as usize
            },
            88usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(refresh_ns))
        );
    }
    test_field_refresh_ns();
    fn test_field_skipped_steps() {
        assert_eq!(
            unsafe {
                let uninit = ::std::mem::MaybeUninit::<dc_optimizer_stats>::uninit();
                let ptr = uninit.as_ptr();
                ::std::ptr::addr_of!((*ptr).skipped_steps) as usize - ptr as usize
            },
            96usize,
            concat!("Offset of field: ", stringify!(dc_optimizer_stats), "::", stringify!(skipped_steps))
        );
    }
    test_field_skipped_steps();
}
extern "C" {
    pub fn dc_optimizer_stats_init(stats: *mut dc_optimizer_stats, struct_size: usize);
}
extern "C" {
    pub fn dc_optimizer_get_stats(optimizer: *mut dc_optimizer, stats: *mut dc_optimizer_stats) -> dc_status;
}
extern "C" {
    pub fn dc_count_set(device: *mut dc_device, name: *const ::std::os::raw::c_char, value: i64) -> dc_status;
}
extern "C" {
    pub fn dc_count_get(device: *mut dc_device, name: *const ::std::os::raw::c_char, value: *mut i64) -> dc_status;
}
extern "C" {
    pub fn dc_count_work(stream: *mut dc_stream, duration_ns: i64) -> dc_status;
}
extern "C" {
    pub fn dc_comm_create_count(
        device: *mut dc_device,
        rank: i32,
        world_size: i32,
        heap: i32,
        comm: *mut *mut dc_comm,
    ) -> dc_status;
}
