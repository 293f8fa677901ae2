/* HMAC-SHA-256 of each provider against the vectors of RFC 4231, and the reference SHA-256 against those of FIPS
 * 180-4. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
/* cmocka wants some of the above first */
#include <cmocka.h>

#include "comm/tcp/hmac/hmac.h"

static void assert_hex(const unsigned char bytes[32], const char *hex) {
  char text[65];
  for (int i = 0; i < 32; i++) {
    snprintf(text + 2 * i, 3, "%02x", bytes[i]);
  }
  assert_string_equal(text, hex);
}

typedef struct vector {
  const char *key; /* NULL: key_byte, key_bytes times */
  int key_byte;
  size_t key_bytes;
  const char *data; /* NULL: data_byte, 50 times */
  int data_byte;
  const char *mac;
} vector;

static const vector vectors[] = {
    {NULL, 0x0b, 20, "Hi There", 0, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    {"Jefe", 0, 4, "what do ya want for nothing?", 0,
     "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
    {NULL, 0xaa, 20, NULL, 0xdd, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
    {"\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19", 0, 25,
     NULL, 0xcd, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
    {NULL, 0xaa, 131, "Test Using Larger Than Block-Size Key - Hash Key First", 0,
     "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
    {NULL, 0xaa, 131,
     "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed "
     "before being used by the HMAC algorithm.",
     0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"}};

static void test_rfc_4231(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
    const vector *v = &vectors[i];
    unsigned char key[131], data[50], mac[32];
    memset(key, v->key_byte, sizeof key);
    memcpy(key, v->key != NULL ? v->key : (const char *)key, v->key != NULL ? v->key_bytes : 0);
    memset(data, v->data_byte, sizeof data);
    const void *text = v->data != NULL ? (const void *)v->data : data;
    size_t bytes = v->data != NULL ? strlen(v->data) : sizeof data;
    for (int provider = 0; provider < DC__HMAC_PROVIDERS; provider++) {
      memset(mac, 0, sizeof mac);
      if (dc__hmac_sha256_by((enum dc__hmac_provider)provider, key, v->key_bytes, text, bytes, mac)) {
        assert_hex(mac, v->mac);
      } else {
        assert_int_not_equal(provider, DC__HMAC_REFERENCE);
      }
    }
    dc__hmac_sha256(key, v->key_bytes, text, bytes, mac);
    assert_hex(mac, v->mac);
  }
}

static void test_fips_180_4(void **state) {
  (void)state;
  static const char two_blocks[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  static unsigned char million[1000000];
  unsigned char digest[32];
  dc__sha256_reference("", 0, digest);
  assert_hex(digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  dc__sha256_reference("abc", 3, digest);
  assert_hex(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  dc__sha256_reference(two_blocks, sizeof two_blocks - 1, digest);
  assert_hex(digest, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  memset(million, 'a', sizeof million);
  dc__sha256_reference(million, sizeof million, digest);
  assert_hex(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* All providers agree on lengths around the block size. */
static void test_lengths(void **state) {
  (void)state;
  unsigned char data[200], mac[32], other[32];
  for (size_t i = 0; i < sizeof data; i++) {
    data[i] = (unsigned char)(7 * i);
  }
  for (size_t bytes = 0; bytes <= sizeof data; bytes++) {
    dc__hmac_sha256_reference(data, 32, data, bytes, mac);
    for (int provider = 0; provider < DC__HMAC_REFERENCE; provider++) {
      if (dc__hmac_sha256_by((enum dc__hmac_provider)provider, data, 32, data, bytes, other)) {
        assert_memory_equal(mac, other, sizeof mac);
      }
    }
  }
}

static void test_compare(void **state) {
  (void)state;
  unsigned char a[32] = {1}, b[32] = {1};
  assert_true(dc__mac_equal(a, b));
  for (int bit = 0; bit < 256; bit++) {
    b[bit / 8] ^= (unsigned char)(1 << bit % 8);
    assert_false(dc__mac_equal(a, b));
    b[bit / 8] ^= (unsigned char)(1 << bit % 8);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_rfc_4231), cmocka_unit_test(test_fips_180_4),
                                     cmocka_unit_test(test_lengths), cmocka_unit_test(test_compare)};
  return cmocka_run_group_tests_name("comm tcp hmac", tests, NULL, NULL);
}
