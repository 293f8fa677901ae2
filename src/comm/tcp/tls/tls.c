/* TLS 1.3 by libssl.so.3. */
#define _GNU_SOURCE /* RTLD_LOCAL */
#include "comm/tcp/tls/tls.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* ---- the library ---- */

typedef unsigned int (*tls_client_psk)(void *ssl, const char *hint, char *identity, unsigned int identity_bytes,
                                       unsigned char *key, unsigned int key_bytes);
typedef unsigned int (*tls_server_psk)(void *ssl, const char *identity, unsigned char *key, unsigned int key_bytes);

#define TLS_FUNCTIONS(X)                                                   \
  X(TLS_method, const void *, (void))                                      \
  X(SSL_CTX_new, void *, (const void *))                                   \
  X(SSL_CTX_ctrl, long, (void *, int, long, void *))                       \
  X(SSL_CTX_set_ciphersuites, int, (void *, const char *))                 \
  X(SSL_CTX_set_num_tickets, int, (void *, size_t))                        \
  X(SSL_CTX_set_psk_client_callback, void, (void *, tls_client_psk))       \
  X(SSL_CTX_set_psk_server_callback, void, (void *, tls_server_psk))       \
  X(SSL_new, void *, (void *))                                             \
  X(SSL_free, void, (void *))                                              \
  X(SSL_set_ex_data, int, (void *, int, void *))                           \
  X(SSL_get_ex_data, void *, (const void *, int))                          \
  X(SSL_set_bio, void, (void *, void *, void *))                           \
  X(SSL_set_connect_state, void, (void *))                                 \
  X(SSL_set_accept_state, void, (void *))                                  \
  X(SSL_do_handshake, int, (void *))                                       \
  X(SSL_session_reused, int, (const void *))                               \
  X(SSL_read, int, (void *, void *, int))                                  \
  X(SSL_peek, int, (void *, void *, int))                                  \
  X(SSL_write, int, (void *, const void *, int))                           \
  X(SSL_key_update, int, (void *, int))                                    \
  X(SSL_get_error, int, (const void *, int))                               \
  X(ERR_clear_error, void, (void))                                         \
  X(BIO_meth_new, void *, (int, const char *))                             \
  X(BIO_meth_set_write, int, (void *, int (*)(void *, const char *, int))) \
  X(BIO_meth_set_read, int, (void *, int (*)(void *, char *, int)))        \
  X(BIO_meth_set_ctrl, int, (void *, long (*)(void *, int, long, void *))) \
  X(BIO_new, void *, (const void *))                                       \
  X(BIO_set_init, void, (void *, int))                                     \
  X(BIO_set_data, void, (void *, void *))                                  \
  X(BIO_get_data, void *, (void *))                                        \
  X(BIO_set_flags, void, (void *, int))                                    \
  X(BIO_clear_flags, void, (void *, int))

/* Constants of openssl/ssl.h, bio.h and tls1.h. */
enum {
  CTRL_MODE = 33,           /* SSL_CTRL_MODE */
  CTRL_SESSION_CACHE = 44,  /* SSL_CTRL_SET_SESS_CACHE_MODE */
  CTRL_LEAST_VERSION = 123, /* SSL_CTRL_SET_MIN_PROTO_VERSION */
  VERSION_1_3 = 0x0304,     /* TLS1_3_VERSION */
  MODE_PARTIAL_WRITE = 1,   /* SSL_MODE_ENABLE_PARTIAL_WRITE */
  MODE_MOVING_BUFFER = 2,   /* SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER */
  WANT_READ = 2,
  WANT_WRITE = 3,                 /* SSL_ERROR_WANT_READ, _WANT_WRITE */
  BIO_SOURCE_SINK = 0x0400 | 127, /* BIO_TYPE_SOURCE_SINK, and a number of the caller's */
  BIO_FLUSH = 11,                 /* BIO_CTRL_FLUSH */
  BIO_READ = 1,
  BIO_WRITE = 2,
  BIO_RETRY = 8, /* BIO_FLAGS_READ, _WRITE, _SHOULD_RETRY */
  APP_DATA = 0,  /* the index of SSL_set_app_data() */
  RECORD = 16384 /* SSL3_RT_MAX_PLAIN_LENGTH */
};

struct dc__tls {
  pthread_mutex_t mutex;
  void *ssl;
  int fd;
  int error;  /* errno of the socket; 0: none */
  bool ended; /* the peer closed the connection */
  bool retries;
  uint64_t records; /* sent with the present key */
  unsigned char key[DC__TLS_KEY];
};

static struct {
#define X(name, result, arguments) result(*name) arguments;
  TLS_FUNCTIONS(X)
#undef X
  void *method, *context;
  char error[300]; /* why it cannot be used; empty: it can */
} tls_library;

static pthread_once_t tls_once = PTHREAD_ONCE_INIT;
static _Atomic(dc__tls *) tls_connections[DC__TLS_SOCKETS];
_Atomic uint64_t dc__tls_records_per_key = UINT64_C(1) << 24;

static unsigned int tls_give_key(void *ssl, unsigned char *key, unsigned int key_bytes) {
  const dc__tls *tls = tls_library.SSL_get_ex_data(ssl, APP_DATA);
  if (tls == NULL || key_bytes < sizeof tls->key) {
    return 0;
  }
  memcpy(key, tls->key, sizeof tls->key);
  return sizeof tls->key;
}

static unsigned int tls_key_of_client(void *ssl, const char *hint, char *identity, unsigned int identity_bytes,
                                      unsigned char *key, unsigned int key_bytes) {
  (void)hint;
  snprintf(identity, identity_bytes, "libdc");
  return tls_give_key(ssl, key, key_bytes);
}

static unsigned int tls_key_of_server(void *ssl, const char *identity, unsigned char *key, unsigned int key_bytes) {
  (void)identity; /* the key is this connection's */
  return tls_give_key(ssl, key, key_bytes);
}

/* The BIO is libdc's own, since OpenSSL's for sockets raises SIGPIPE. */
static int tls_bio_result(void *bio, ssize_t got, int retry) {
  dc__tls *tls = tls_library.BIO_get_data(bio);
  tls_library.BIO_clear_flags(bio, BIO_READ | BIO_WRITE | BIO_RETRY);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    tls_library.BIO_set_flags(bio, retry | BIO_RETRY);
  } else if (got < 0) {
    tls->error = errno;
  }
  return (int)got;
}

static int tls_bio_write(void *bio, const char *data, int bytes) {
  const dc__tls *tls = tls_library.BIO_get_data(bio);
  return tls_bio_result(bio, send(tls->fd, data, (size_t)bytes, MSG_NOSIGNAL | MSG_DONTWAIT), BIO_WRITE);
}

static int tls_bio_read(void *bio, char *data, int bytes) {
  dc__tls *tls = tls_library.BIO_get_data(bio);
  const ssize_t got = recv(tls->fd, data, (size_t)bytes, MSG_DONTWAIT);
  tls->ended = tls->ended || (got == 0 && bytes > 0);
  return tls_bio_result(bio, got, BIO_READ);
}

static long tls_bio_control(void *bio, int command, long number, void *pointer) {
  (void)bio;
  (void)number;
  (void)pointer;
  return command == BIO_FLUSH;
}

/* Sets one cipher, no sessions to resume, and one record per call. */
static bool tls_make_context(void) {
  tls_library.method = tls_library.BIO_meth_new(BIO_SOURCE_SINK, "libdc");
  tls_library.context = tls_library.SSL_CTX_new(tls_library.TLS_method());
  void *method = tls_library.method, *context = tls_library.context;
  if (method == NULL || context == NULL ||
      tls_library.SSL_CTX_ctrl(context, CTRL_LEAST_VERSION, VERSION_1_3, NULL) != 1 ||
      tls_library.SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1 ||
      tls_library.SSL_CTX_set_num_tickets(context, 0) != 1) {
    return false;
  }
  (void)tls_library.SSL_CTX_ctrl(context, CTRL_MODE, MODE_PARTIAL_WRITE | MODE_MOVING_BUFFER, NULL);
  (void)tls_library.SSL_CTX_ctrl(context, CTRL_SESSION_CACHE, 0, NULL);
  tls_library.SSL_CTX_set_psk_client_callback(context, tls_key_of_client);
  tls_library.SSL_CTX_set_psk_server_callback(context, tls_key_of_server);
  return tls_library.BIO_meth_set_write(method, tls_bio_write) == 1 &&
         tls_library.BIO_meth_set_read(method, tls_bio_read) == 1 &&
         tls_library.BIO_meth_set_ctrl(method, tls_bio_control) == 1;
}

/* The library stays open: its functions are used as long as the process runs. */
static void tls_open_library(void) {
  const char *missing = NULL;
  void *module = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (module == NULL) {
    const char *reason = dlerror();
    snprintf(tls_library.error, sizeof tls_library.error, "%s", reason == NULL ? "it does not load" : reason);
    return;
  }
#define X(name, result, arguments) DC__DLSYM(module, &tls_library, name, missing)
  TLS_FUNCTIONS(X)
#undef X
  if (missing != NULL) {
    snprintf(tls_library.error, sizeof tls_library.error, "it has no %s", missing);
  } else if (!tls_make_context()) {
    snprintf(tls_library.error, sizeof tls_library.error, "it has no TLS 1.3 with TLS_AES_128_GCM_SHA256");
  }
  if (missing == NULL) {
    tls_library.ERR_clear_error();
  }
}

dc_status dc__tls_load(const char *fn) {
  pthread_once(&tls_once, tls_open_library);
  return tls_library.error[0] == '\0'
             ? DC_OK
             : dc__fail(DC_E_UNSUPPORTED,
                        "%s: options.tls = 1 needs libssl.so.3 of OpenSSL 3 (Debian's package libssl3), which cannot "
                        "be used: %s",
                        fn, tls_library.error);
}

/* ---- connections ---- */

dc__tls *dc__tls_of(int fd) {
  return fd >= 0 && fd < DC__TLS_SOCKETS ? atomic_load_explicit(&tls_connections[fd], memory_order_acquire) : NULL;
}

static void tls_free(dc__tls *tls) {
  if (tls->ssl != NULL) {
    tls_library.SSL_free(tls->ssl);
  }
  pthread_mutex_destroy(&tls->mutex);
  explicit_bzero(tls->key, sizeof tls->key);
  dc__free(tls);
}

static bool tls_make_ssl(dc__tls *tls) {
  tls_library.ERR_clear_error();
  tls->ssl = tls_library.SSL_new(tls_library.context);
  void *bio = tls->ssl == NULL ? NULL : tls_library.BIO_new(tls_library.method);
  if (bio == NULL) {
    return false;
  }
  tls_library.BIO_set_data(bio, tls);
  tls_library.BIO_set_init(bio, 1);
  tls_library.SSL_set_bio(tls->ssl, bio, bio); /* the SSL object owns it now */
  return tls_library.SSL_set_ex_data(tls->ssl, APP_DATA, tls) == 1;
}

bool dc__tls_begin(int fd, bool connects, const unsigned char key[DC__TLS_KEY]) {
  dc__tls *tls = fd < DC__TLS_SOCKETS ? dc__calloc(1, sizeof *tls) : NULL;
  if (tls == NULL) {
    errno = fd < DC__TLS_SOCKETS ? ENOMEM : EMFILE;
    return false;
  }
  pthread_mutex_init(&tls->mutex, NULL);
  tls->fd = fd;
  memcpy(tls->key, key, sizeof tls->key);
  if (!tls_make_ssl(tls)) {
    tls_library.ERR_clear_error();
    tls_free(tls);
    errno = ENOMEM;
    return false;
  }
  (connects ? tls_library.SSL_set_connect_state : tls_library.SSL_set_accept_state)(tls->ssl);
  atomic_store_explicit(&tls_connections[fd], tls, memory_order_release);
  return true;
}

void dc__tls_end(int fd) {
  dc__tls *tls = dc__tls_of(fd);
  if (tls != NULL) {
    dc__tls_forget(fd);
    tls_free(tls);
  }
}

void dc__tls_forget(int fd) {
  if (fd >= 0 && fd < DC__TLS_SOCKETS) {
    atomic_store_explicit(&tls_connections[fd], NULL, memory_order_release);
  }
}

/* Leaves no error in the thread's queue, which the program may use too. */
static int tls_result(dc__tls *tls, int got) {
  if (got > 0) {
    return got;
  }
  const int kind = tls_library.SSL_get_error(tls->ssl, got);
  tls_library.ERR_clear_error();
  errno = kind == WANT_READ || kind == WANT_WRITE ? EAGAIN : tls->error != 0 ? tls->error : tls->ended ? 0 : EBADMSG;
  return errno == 0 ? 0 : -1;
}

int dc__tls_handshake(dc__tls *tls) {
  pthread_mutex_lock(&tls->mutex);
  tls_library.ERR_clear_error();
  int result = tls_result(tls, tls_library.SSL_do_handshake(tls->ssl));
  if (result == 1 && tls_library.SSL_session_reused(tls->ssl) != 1) { /* it was made without the key */
    errno = EBADMSG;
    result = -1;
  }
  if (result == 1) {
    explicit_bzero(tls->key, sizeof tls->key);
  }
  pthread_mutex_unlock(&tls->mutex);
  return result;
}

static size_t tls_gather(const struct iovec *list, size_t count, char record[RECORD]) {
  size_t used = 0;
  for (size_t i = 0; i < count && used < RECORD; i++) {
    const size_t step = list[i].iov_len < RECORD - used ? list[i].iov_len : RECORD - used;
    memcpy(record + used, list[i].iov_base, step);
    used += step;
  }
  return used;
}

/* Not between two tries to send one record. */
static void tls_renew_key(dc__tls *tls) {
  const uint64_t most = atomic_load_explicit(&dc__tls_records_per_key, memory_order_relaxed);
  if (!tls->retries && tls->records >= most && tls_library.SSL_key_update(tls->ssl, 0) == 1) {
    tls->records = 0;
  }
}

ssize_t dc__tls_write(dc__tls *tls, const struct iovec *list, size_t count) {
  char record[RECORD];
  const void *data = list[0].iov_base;
  size_t bytes = list[0].iov_len < RECORD ? list[0].iov_len : RECORD;
  if (count > 1 && bytes < RECORD) {
    bytes = tls_gather(list, count, record);
    data = record;
  }
  pthread_mutex_lock(&tls->mutex);
  tls_library.ERR_clear_error();
  tls_renew_key(tls);
  const int sent = tls_result(tls, tls_library.SSL_write(tls->ssl, data, (int)bytes));
  tls->retries = sent < 0 && errno == EAGAIN;
  tls->records += sent > 0;
  pthread_mutex_unlock(&tls->mutex);
  if (sent == 0) { /* for a sender any end is an error */
    errno = EPIPE;
    return -1;
  }
  return sent;
}

ssize_t dc__tls_read(dc__tls *tls, void *data, size_t bytes, bool peeks) {
  const int most = bytes < RECORD ? (int)bytes : RECORD;
  pthread_mutex_lock(&tls->mutex);
  tls_library.ERR_clear_error();
  const int got = tls_result(tls, (peeks ? tls_library.SSL_peek : tls_library.SSL_read)(tls->ssl, data, most));
  pthread_mutex_unlock(&tls->mutex);
  return got;
}
