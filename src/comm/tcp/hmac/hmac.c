/* Chooses the library for HMAC-SHA-256, once per process. */
#define _GNU_SOURCE
#include "comm/tcp/hmac/hmac.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>

#include "base/base.h"

typedef struct hmac_libraries {
  const void *(*EVP_sha256)(void);
  unsigned char *(*HMAC)(const void *md, const void *key, int key_bytes, const unsigned char *data, size_t bytes,
                         unsigned char *mac, unsigned int *mac_bytes);
  size_t (*crypto_auth_hmacsha256_statebytes)(void);
  int (*crypto_auth_hmacsha256_init)(void *state, const unsigned char *key, size_t key_bytes);
  int (*crypto_auth_hmacsha256_update)(void *state, const unsigned char *data, unsigned long long bytes);
  int (*crypto_auth_hmacsha256_final)(void *state, unsigned char *mac);
  bool has[DC__HMAC_PROVIDERS];
} hmac_libraries;

enum { SODIUM_STATE_BYTES = 1024 }; /* the library needs 208 in all of its versions */

static hmac_libraries libraries = {.has = {[DC__HMAC_REFERENCE] = true}};
static pthread_once_t libraries_once = PTHREAD_ONCE_INIT;

/* The libraries stay open: their functions are used as long as the process runs. */
static void open_libraries(void) {
  const char *missing = NULL;
  void *crypto = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
  if (crypto != NULL) {
    DC__DLSYM(crypto, &libraries, EVP_sha256, missing);
    DC__DLSYM(crypto, &libraries, HMAC, missing);
    libraries.has[DC__HMAC_LIBCRYPTO] = missing == NULL;
  }
  missing = NULL;
  void *sodium = dlopen("libsodium.so.23", RTLD_NOW | RTLD_LOCAL);
  if (sodium != NULL) {
    DC__DLSYM(sodium, &libraries, crypto_auth_hmacsha256_statebytes, missing);
    DC__DLSYM(sodium, &libraries, crypto_auth_hmacsha256_init, missing);
    DC__DLSYM(sodium, &libraries, crypto_auth_hmacsha256_update, missing);
    DC__DLSYM(sodium, &libraries, crypto_auth_hmacsha256_final, missing);
    libraries.has[DC__HMAC_LIBSODIUM] =
        missing == NULL && libraries.crypto_auth_hmacsha256_statebytes() <= SODIUM_STATE_BYTES;
  }
}

static bool hmac_by_libcrypto(const void *key, size_t key_bytes, const void *data, size_t bytes,
                              unsigned char mac[32]) {
  unsigned int got = 0;
  return libraries.HMAC(libraries.EVP_sha256(), key, (int)key_bytes, data, bytes, mac, &got) != NULL &&
         got == DC__MAC_BYTES;
}

static bool hmac_by_libsodium(const void *key, size_t key_bytes, const void *data, size_t bytes,
                              unsigned char mac[32]) {
  _Alignas(64) unsigned char state[SODIUM_STATE_BYTES];
  return libraries.crypto_auth_hmacsha256_init(state, key, key_bytes) == 0 &&
         libraries.crypto_auth_hmacsha256_update(state, data, bytes) == 0 &&
         libraries.crypto_auth_hmacsha256_final(state, mac) == 0;
}

bool dc__hmac_sha256_by(enum dc__hmac_provider provider, const void *key, size_t key_bytes, const void *data,
                        size_t bytes, unsigned char mac[32]) {
  pthread_once(&libraries_once, open_libraries);
  if (!libraries.has[provider]) {
    return false;
  }
  switch (provider) {
    case DC__HMAC_LIBCRYPTO:
      return hmac_by_libcrypto(key, key_bytes, data, bytes, mac);
    case DC__HMAC_LIBSODIUM:
      return hmac_by_libsodium(key, key_bytes, data, bytes, mac);
    default:
      dc__hmac_sha256_reference(key, key_bytes, data, bytes, mac);
      return true;
  }
}

/* A library may refuse at run time, as in a mode of certified algorithms only; then the next one is tried. */
void dc__hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t bytes, unsigned char mac[32]) {
  for (int provider = 0; provider < DC__HMAC_PROVIDERS; provider++) {
    if (dc__hmac_sha256_by((enum dc__hmac_provider)provider, key, key_bytes, data, bytes, mac)) {
      return;
    }
  }
}

bool dc__mac_equal(const unsigned char a[32], const unsigned char b[32]) {
  volatile unsigned char difference = 0; /* no compiler may end the loop early */
  for (int i = 0; i < DC__MAC_BYTES; i++) {
    difference = (unsigned char)(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

bool dc__random_bytes(void *to, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t got = getrandom((char *)to + at, bytes - at, 0);
    if (got < 0 && errno != EINTR) {
      return false;
    }
    at += got > 0 ? (size_t)got : 0;
  }
  return true;
}
